"""The engine that callers hold: requests in, completions out."""

from ninfer_jax.engine.engine import Engine
from ninfer_jax.engine.results import AnswerLost, Completion, Delta, Stats, TokenLogprob

__all__ = ["AnswerLost", "Completion", "Delta", "Engine", "Stats", "TokenLogprob"]
