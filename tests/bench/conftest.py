"""Rows without an engine, and the standard engine under the name of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ninfer_jax import Engine
from ninfer_jax.bench.device import PROCESS_PEAK, Memory
from ninfer_jax.bench.matrix import Cell
from ninfer_jax.bench.measure import Sample
from ninfer_jax.bench.results import Row

SETTINGS = {"model": "m", "weights": "w", "corpus": "text", "warmup": 1, "repeats": 3, "prefill_chunk": 64, "dtype": "auto"}
VERSIONS = {"jax": "0.10.2", "source": "abc", "device": "a device"}


@pytest.fixture(scope="session")
def engine(draft_engine) -> Engine:
    return draft_engine


@pytest.fixture
def row() -> Callable[..., Row]:
    """Makes a row: of a cell given by its changed fields, with one sample a (prefill seconds, decode seconds)."""

    def make(
        times: tuple[tuple[float, float], ...] = ((0.5, 2.0), (1.0, 1.0), (0.25, 4.0)), memory: int | None = 2**20, **fields: Any
    ) -> Row:
        given = {"prompt": 64, "gen": 9, "depth": 0, "kv": "f32", "draft": 2, "slots": 1} | fields
        own = {k: given.pop(k) for k in ("refused", "settings", "versions", "date", "energy") if k in given}
        cell = Cell(**given)
        rounds = 4 * cell.slots
        samples = tuple(
            Sample(
                cell.slots * cell.prompt,
                prefill,
                0.0,
                prefill,
                cell.slots * (cell.gen - 1),
                decode,
                rounds,
                rounds * cell.draft,
                at + 1 if cell.draft else 0,
                own.get("energy"),
            )
            for at, (prefill, decode) in enumerate(times)
        )
        common = (cell, own.get("settings", SETTINGS), own.get("versions", VERSIONS), own.get("date", "2026-11-30T10:00:00+00:00"))
        if "refused" in own:
            return Row(*common, refused=own["refused"])
        return Row(*common, context=cell.context or cell.need, load=0.5, samples=samples, memory=Memory(memory, PROCESS_PEAK))

    make.settings, make.versions = SETTINGS, VERSIONS
    return make
