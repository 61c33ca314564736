"""The engine that callers hold: requests in, completions out."""

from ninfer_jax.engine.async_engine import AsyncEngine, Running
from ninfer_jax.engine.engine import Engine
from ninfer_jax.engine.load import Load
from ninfer_jax.engine.results import AnswerLost, Completion, Delta, EngineStopped, QueueFull, Stats, TokenLogprob

__all__ = [
    "AnswerLost",
    "AsyncEngine",
    "Completion",
    "Delta",
    "Engine",
    "EngineStopped",
    "Load",
    "QueueFull",
    "Running",
    "Stats",
    "TokenLogprob",
]
