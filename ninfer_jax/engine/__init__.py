"""The engine that callers hold: requests in, completions out."""

from ninfer_jax.engine.engine import Engine
from ninfer_jax.engine.results import Completion, Delta, Stats, TokenLogprob

__all__ = ["Completion", "Delta", "Engine", "Stats", "TokenLogprob"]
