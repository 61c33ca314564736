"""Two engines of the bundled model, and text to measure on."""

from __future__ import annotations

import pytest

from ninfer_jax import Engine, EngineConfig
from weights import tiny_path

TEXT = """PROSPERO.
Our revels now are ended. These our actors, as I foretold you, were all spirits, and are melted into air, into thin air.

    def push(self, item):
        # éèü: bytes are not letters
        self.items.append(item)
        return len(self.items)

MIRANDA.
If by your art, my dearest father, you have put the wild waters in this roar, allay them. The sky, it seems, would pour down
stinking pitch, but that the sea, mounting to the welkin's cheek, dashes the fire out.
"""


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
