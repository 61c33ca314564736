"""A prefix cache at work, from settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from ninfer_jax.cache import PrefixCache
from ninfer_jax.config import EngineConfig
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.engine.slot_pool import SlotPool
from ninfer_jax.planning.kept import check_budget

Identity = Callable[[], Mapping[str, str | int]]


def open_prefixes(pool: SlotPool, config: EngineConfig, mode: str, budget: int, identity: Identity) -> KeptPrefixes:
    """A cache at work, with what its directory holds. identity: called where there is a directory, or a conversation is saved."""
    programs = pool.programs
    check_budget(budget, programs.staging_bytes, programs.page_bytes, programs.chunk)
    told: list[str] = []
    folder = None if config.cache_dir is None else Path(config.cache_dir)
    identity = cache(identity)
    kept = PrefixCache(
        programs.page_bytes,
        programs.staging_bytes,
        budget,
        folder=folder,
        disk_bytes=config.cache_dir_bytes,
        identity=None if folder is None else identity(),
        notice=told.append,
    )
    return KeptPrefixes(pool, kept, mode, identity, told)
