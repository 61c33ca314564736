"""Qwen3.6/3.8-27B on one 24 GB card with its full context: a fixed-shape JAX inference engine.

The names are imported when they are first used, so that `ninfer_jax.__version__` and the command line's help do not wait
for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninfer_jax.config import EngineConfig, ModelConfig
    from ninfer_jax.decoding import Grammar, SamplingParams
    from ninfer_jax.engine import AnswerLost, AsyncEngine, Completion, Delta, Engine, EngineStopped, QueueFull, Stats, TokenLogprob

__version__ = "0.1.0"
__all__ = [
    "AnswerLost",
    "AsyncEngine",
    "Completion",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineStopped",
    "Grammar",
    "ModelConfig",
    "QueueFull",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
]

_HOMES = {"EngineConfig": "config", "ModelConfig": "config", "SamplingParams": "decoding", "Grammar": "decoding"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'engine')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
