"""Small checkpoints of random weights to damage, and an engine that many share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from shared import PARAMS, PROMPTS

from ninfer_jax import AsyncEngine, Completion, Engine


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


@pytest.fixture(scope="module")
def right(micro_engine: Engine) -> list[Completion]:
    """The requests of `shared`, each alone, without drafts, by the blocking engine."""
    return [micro_engine.generate(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture
def shared(micro_drafting: Engine) -> Iterator[AsyncEngine]:
    """Two slots, one draft, a queue of 30; all of it is free again when a test has ended."""
    engine = AsyncEngine(micro_drafting, queue=30)
    yield engine
    assert engine.close(timeout=60)
    runner = micro_drafting.runner
    assert runner.busy == 0 and runner.free_tokens == runner.pool_tokens and not runner.live


@pytest.fixture
def drained(micro_drafting: Engine) -> Callable[[], None]:
    """Waits until nothing is under way."""

    def wait() -> None:
        for _ in range(6000):
            if not micro_drafting.runner.live and micro_drafting.runner.busy == 0:
                return
            time.sleep(0.01)
        raise AssertionError("requests are still under way")

    return wait
