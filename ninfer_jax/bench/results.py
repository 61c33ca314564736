"""Results of a matrix in one JSON file, complete after every cell."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.bench.device import Memory
from ninfer_jax.bench.matrix import Cell
from ninfer_jax.bench.measure import Sample
from ninfer_jax.files import read_json

FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of the repeats."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Row:
    """A measured cell, or a refused one: then `refused` says why and there are no samples.

    settings, versions: what has to be the same for the row to stand for a new measurement. context: tokens a slot of the
    engine held. load: the machine's load average before the first repeat, None where it has none. date: ISO, UTC.
    """

    cell: Cell
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str
    context: int | None = None
    load: float | None = None
    samples: tuple[Sample, ...] = ()
    memory: Memory | None = None
    refused: str | None = None

    def same_as(self, cell: Cell, settings: dict[str, Any], versions: dict[str, str]) -> bool:
        return (self.cell, self.settings, self.versions) == (cell, settings, versions)

    @property
    def prefill(self) -> Spread | None:
        """Prompt tokens a second."""
        return self._spread(lambda s: s.prefill_tokens / s.prefill_s)

    @property
    def decode(self) -> Spread | None:
        """Tokens a second after the first, all slots together; None when only a first token was asked for."""
        return self._spread(lambda s: s.decode_tokens / s.decode_s if s.decode_tokens else None)

    @property
    def ttft(self) -> Spread | None:
        """Seconds to the (last slot's) first token."""
        return self._spread(lambda s: s.ttft_s)

    @property
    def rounds(self) -> Spread | None:
        """Decode rounds a repeat, of all slots in sum."""
        return self._spread(lambda s: s.rounds)

    @property
    def energy(self) -> Spread | None:
        """Joules a decoded token."""
        return self._spread(lambda s: s.energy_j / s.decode_tokens if s.decode_tokens and s.energy_j is not None else None)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts over drafts, of all repeats together; None without drafts."""
        drafted = sum(s.drafted for s in self.samples)
        return sum(s.accepted for s in self.samples) / drafted if drafted else None

    def _spread(self, of: Callable[[Sample], float | None]) -> Spread | None:
        values = [value for sample in self.samples if (value := of(sample)) is not None]
        return Spread(statistics.median(values), min(values), max(values)) if values else None

    def json(self) -> dict[str, Any]:
        named = dict(
            prefill_tok_s=self.prefill, decode_tok_s=self.decode, ttft_s=self.ttft, rounds=self.rounds, joules_per_token=self.energy
        )
        measured = {name: spread and dataclasses.asdict(spread) for name, spread in named.items()}
        own = dataclasses.asdict(self)
        return {"how": "refused" if self.refused else "measured", **own, "summary": {**measured, "acceptance": self.acceptance}}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Row:
        own = {field.name: given[field.name] for field in dataclasses.fields(cls)}
        memory, samples = own.pop("memory"), own.pop("samples")
        own |= {"cell": Cell(**own["cell"]), "samples": tuple(Sample(**s) for s in samples), "memory": memory and Memory(**memory)}
        return cls(**own)


class Results:
    """Rows, kept in a file where there is one: it is replaced in one step, so a reader or a crash never sees half of it."""

    def __init__(self, path: Path | None = None, rows: Iterable[Row] = ()):
        self.path, self.rows = path, list(rows)

    def find(self, cell: Cell, settings: dict[str, Any], versions: dict[str, str]) -> Row | None:
        return next((row for row in self.rows if row.same_as(cell, settings, versions)), None)

    def add(self, row: Row) -> None:
        """Take a row in, in the place of one for the same cell, settings and versions, and write the file."""
        self.rows = [r for r in self.rows if not r.same_as(row.cell, row.settings, row.versions)] + [row]
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        text = json.dumps({"ninfer_jax_bench": FORMAT, "rows": [row.json() for row in self.rows]}, indent=1)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.chmod(name, 0o644)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `Results` wrote. ValueError, one line, for anything else."""
    given = read_json(path)
    if not isinstance(given, dict) or given.get("ninfer_jax_bench") != FORMAT:
        raise ValueError(f"{path}: not a file of `ninfer-jax bench --json` (its ninfer_jax_bench must be {FORMAT})")
    try:
        return [Row.from_json(row) for row in given["rows"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a row is damaged ({type(error).__name__}: {error}); measure again into another file") from None
