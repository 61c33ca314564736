"""Small checkpoints of random weights to damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest


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
