"""The standard engines under the names of this folder, and the text that measures are tested on."""

from __future__ import annotations

import pytest
from sample_text import TEXT

from ninfer_jax import Engine


@pytest.fixture(scope="session")
def engine(draft_engine) -> Engine:
    return draft_engine


@pytest.fixture(scope="session")
def ids(engine) -> list[int]:
    return engine.tokenizer.encode(TEXT)
