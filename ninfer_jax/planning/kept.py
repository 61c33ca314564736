"""From settings to a prefix cache's mode and its budget of host memory, and what can be refused about them."""

from __future__ import annotations

from ninfer_jax.config import PAGE, EngineConfig

MOST = 8 << 30  # bytes of host memory, where none are asked for
SHARE = 4  # of what is free, one part in so many


def mode_of(config: EngineConfig, many: bool = False) -> str:
    """The mode that "auto" means. many: in an engine for many callers."""
    if config.prefix_cache != "auto":
        return config.prefix_cache
    return "exact" if many or config.cache_dir is not None or config.cache_bytes is not None else "off"


def budget_of(config: EngineConfig, free: int | None) -> int:
    """Bytes of host memory that the cache may hold. free: of the host now, None where nothing tells."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    return MOST if free is None else min(MOST, free // SHARE)


def check_budget(budget: int, state_bytes: int, page_bytes: int, chunk: int) -> None:
    """ValueError where not one checkpoint after one chunk fits."""
    need = state_bytes + page_bytes * -(-chunk // PAGE)
    if budget < need:
        raise ValueError(
            f"cache_bytes: {budget:,} bytes of host memory hold no checkpoint of this model: one takes {state_bytes:,} for its "
            f"state and {need - state_bytes:,} for the pages of {chunk} tokens; give more, or prefix_cache='off'"
        )
