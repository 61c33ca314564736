"""Small checkpoints of random weights to damage, and the standard engine in the form that a GPU runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import micro
import numpy as np
import pytest

from ninfer_jax import Engine
from ninfer_jax.model import TextModel
from ninfer_jax.programs import Programs


@pytest.fixture(scope="session")
def together(draft_engine: Engine) -> Engine:
    """The engine with drafts, but all rows of a round go through the model in one pass."""
    engine = copy.copy(draft_engine)
    model = TextModel(engine.model_config, jnp.dtype("float32"), mtp=True)
    shape = engine.programs.shape._replace(rows_together=True)
    engine._programs = Programs(model, shape, engine.programs.chunk, engine.tokenizer.vocab_size, "cpu")
    return engine


@pytest.fixture
def checkpoint_dir(tmp_path: Path, random_tensors: Mapping[str, np.ndarray]) -> Callable[..., Path]:
    """Writes a complete checkpoint directory; each call a fresh one.

    config: keys of config.json to change. tensors: arrays to add or replace, or None to leave one out. shard_bytes: as
    for `save_checkpoint`.
    """
    count = 0

    def write(
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray | None] | None = None,
        shard_bytes: int | None = None,
    ) -> Path:
        nonlocal count
        count += 1
        wanted = {name: array for name, array in {**random_tensors, **(tensors or {})}.items() if array is not None}
        return micro.write(tmp_path / f"checkpoint{count}", wanted, config, shard_bytes)

    return write
