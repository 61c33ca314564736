"""Two engines of the bundled model."""

from __future__ import annotations

import pytest
from sample_text import TEXT

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Two slots, two drafts a round, f32 pages, 512 tokens."""
    return Engine.load(tiny_path(), EngineConfig(context=512, prefill_chunk=64, kv="f32", slots=2, draft=2))


@pytest.fixture(scope="session")
def coarse_engine() -> Engine:
    """One slot, no drafts, 4-bit pages, 512 tokens."""
    return Engine.load(tiny_path(), EngineConfig(context=512, prefill_chunk=64, kv="rk4v4"))


@pytest.fixture(scope="session")
def ids(engine) -> list[int]:
    return engine.tokenizer.encode(TEXT)
