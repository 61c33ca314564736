"""Measure a matrix: each engine made once, every cell kept as soon as it is there, what does not fit refused by name."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from ninfer_jax.bench.corpus import Corpus
from ninfer_jax.bench.device import PeakMemory, energy_meter
from ninfer_jax.bench.matrix import Cell, EngineCells
from ninfer_jax.bench.measure import measure
from ninfer_jax.bench.results import Results, Row
from ninfer_jax.config import EngineConfig
from ninfer_jax.engine import Engine

Load = Callable[[EngineConfig], Engine]
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """Settings that a cell's result depends on beside the cell. model: directory name; weights: fingerprint of its files; corpus:
    its name; kernels: "auto" on a card; drafter: of cells whose draft is not 0."""

    model: str
    weights: str
    corpus: str
    warmup: int
    repeats: int
    prefill_chunk: int
    dtype: str
    kernels: str = "auto"
    drafter: str = "mtp"

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.repeats < 1:
            field, least = ("warmup", 0) if self.warmup < 0 else ("repeats", 1)
            raise ValueError(f"{field} is {getattr(self, field)}, it must be at least {least}")


class Bench:
    """A matrix being measured.

    load: makes an engine. results: where rows go; cells that it has measured, with the same settings and versions, are not
    measured again. tell: called with (stage, done, in all) while something goes on; on_row with every row, old ones too.
    """

    def __init__(
        self,
        settings: Settings,
        versions: dict[str, str],
        corpus: Corpus,
        load: Load,
        results: Results,
        tell: Tell = lambda stage, done, total: None,
        on_row: Callable[[Row], None] = lambda row: None,
    ):
        self._given, self._settings, self._versions = settings, asdict(settings), versions
        self._corpus, self._load, self._results, self._tell, self._on_row = corpus, load, results, tell, on_row
        device = jax.devices()[0]
        self._memory, self._energy = PeakMemory(device), energy_meter(device)

    def run(self, groups: Sequence[EngineCells]) -> list[Row]:
        """A row for every cell, in the order of the groups."""
        return [row for group in groups for row in self._run_group(group)]

    def _run_group(self, group: EngineCells) -> list[Row]:
        rows: dict[Cell, Row] = {}
        for cell in group.cells:
            row = self._results.find(cell, self._settings, self._versions)
            if row and not row.refused:  # what was refused may fit by now
                rows[cell] = row
                self._on_row(row)
            elif reason := self._too_large(cell):
                rows[cell] = self._refuse(cell, reason)
        # Cells measured before count for the size too: the engine is the one that an uninterrupted run would have made.
        sized_by = [cell for cell in group.cells if cell not in rows or not rows[cell].refused]
        while todo := [cell for cell in group.cells if cell not in rows]:
            context = group.context or max(cell.need for cell in sized_by)
            engine = self._engine(group, context)
            if isinstance(engine, str):
                # Without the largest cells a smaller engine will do.
                out = [cell for cell in sized_by if group.context or cell.need == context]
                rows |= {cell: self._refuse(cell, engine) for cell in out if cell in todo}
                sized_by = [cell for cell in sized_by if cell not in out]
                continue
            for cell in todo:
                rows[cell] = self._measure(engine, cell)
            del engine
            gc.collect()  # its arrays have to be gone before the next one asks for memory
        return [rows[cell] for cell in group.cells]

    def _engine(self, group: EngineCells, context: int) -> Engine | str:
        """The engine, or why there is none."""
        gc.collect()
        self._memory.restart()
        try:
            return self._load(
                EngineConfig(
                    context=context,
                    slots=group.slots,
                    draft=group.draft,
                    drafter=self._given.drafter if group.draft else "none",
                    kv=group.kv,
                    prefill_chunk=self._given.prefill_chunk,
                    dtype=self._given.dtype,
                    kernels=self._given.kernels,
                )
            )
        except ValueError as error:
            return str(error)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return f"memory: {str(error).splitlines()[0]}"

    def _too_large(self, cell: Cell) -> str | None:
        if cell.context and cell.need > cell.context:
            return f"context: {cell.need} tokens are needed, --context is {cell.context}"
        try:
            self._texts(cell)
        except ValueError as error:
            return str(error)
        return None

    def _texts(self, cell: Cell) -> list[list[list[int]]]:
        return self._corpus.texts(self._given.warmup + self._given.repeats, cell.slots, cell.depth + cell.prompt)

    def _measure(self, engine: Engine, cell: Cell) -> Row:
        samples, load = [], None
        for number, texts in enumerate(self._texts(cell)):
            repeat = number - self._given.warmup
            if repeat == 0:
                load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            name = f"{cell}: " + (f"repeat {repeat + 1}" if repeat >= 0 else "warm-up")
            sample = measure(engine, cell, texts, self._energy, lambda done, total, name=name: self._tell(name, done, total))
            if repeat >= 0:
                samples.append(sample)
        return self._keep(cell, context=engine.context, load=load, samples=tuple(samples), memory=self._memory.read())

    def _refuse(self, cell: Cell, reason: str) -> Row:
        return self._keep(cell, refused=reason)

    def _keep(self, cell: Cell, **found: Any) -> Row:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = Row(cell, self._settings, self._versions, date, **found)
        self._results.add(row)
        self._on_row(row)
        return row


def tokens_needed(cells: Sequence[Cell], settings: Settings) -> int:
    """Corpus tokens of the cell that needs most."""
    runs = settings.warmup + settings.repeats
    return max(runs * cell.slots * (cell.depth + cell.prompt) for cell in cells)
