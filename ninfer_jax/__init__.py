"""Qwen3.6/3.8-27B on one 24 GB card with its full context: a fixed-shape JAX inference engine."""

from ninfer_jax.config import EngineConfig, ModelConfig
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine import Completion, Delta, Engine, Stats, TokenLogprob

__all__ = ["Completion", "Delta", "Engine", "EngineConfig", "ModelConfig", "SamplingParams", "Stats", "TokenLogprob"]
