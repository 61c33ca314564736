"""Rows as a table, as CSV, and against the rows of an earlier run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.table import Table

from ninfer_jax.bench.results import Row, Spread

CELL = ("prompt", "gen", "depth", "kv", "draft", "slots")
_NONE = "n/a"


def table(rows: Sequence[Row]) -> Table:
    """Medians of the repeats with (least..largest) behind them; rows share settings and versions."""
    first = rows[0]
    title = f"{first.settings['model']} on {first.versions['device']}, jax {first.versions['jax']}"
    if (kernels := first.settings.get("kernels", "auto")) != "auto":
        title += f", kernels {kernels}"
    if (drafter := first.settings.get("drafter", "mtp")) != "mtp":
        title += f", drafter {drafter}"
    whats = {row.memory.what for row in rows if row.memory}
    peak = "peak MiB" + (f"\n{whats.pop()}" if len(whats) == 1 else "")
    made = Table(title=title, title_justify="left", caption=_caption(first), caption_justify="left")
    for head in (*_cell_heads(), "context", "prefill tok/s", "decode tok/s", "TTFT ms", "rounds", "accepted", peak, "J/token"):
        made.add_column(head, justify="left" if head == "kv" else "right", no_wrap=True)
    for row in rows:
        if row.refused:
            made.add_row(*_cell(row), str(row.cell.context or ""), "refused", *[""] * 6)
            continue
        memory = row.memory.bytes if row.memory else None
        made.add_row(
            *_cell(row),
            str(row.context),
            _spread(row.prefill),
            _spread(row.decode),
            _spread(row.ttft, 1e3),
            _NONE if row.rounds is None else f"{row.rounds.median:g}",
            _NONE if row.acceptance is None else f"{row.acceptance:.1%}",
            _NONE if memory is None else f"{memory / 2**20:,.0f}",
            _spread(row.energy, digits=3),
        )
    return made


def refusals(rows: Sequence[Row]) -> list[str]:
    """A line for each refused cell."""
    return [f"refused: {row.cell}: {row.refused}" for row in rows if row.refused]


def to_csv(rows: Sequence[Row]) -> str:
    """One line a cell; empty where there is no figure."""
    out = io.StringIO()
    spreads = {
        "prefill_tok_s": "prefill",
        "decode_tok_s": "decode",
        "ttft_s": "ttft",
        "rounds": "rounds",
        "joules_per_token": "energy",
    }
    names = [name + end for name in spreads for end in ("", "_min", "_max")]
    write = csv.writer(out, lineterminator="\n")
    write.writerow(["how", "model", "device", *CELL, "context", *names, "acceptance", "memory_bytes", "memory_what", "refused"])
    for row in rows:
        found: list[object] = []
        for attribute in spreads.values():
            spread: Spread | None = getattr(row, attribute)
            found += [spread.median, spread.low, spread.high] if spread else [None] * 3
        memory = [row.memory.bytes, row.memory.what] if row.memory else [None, None]
        cell = [getattr(row.cell, name) for name in CELL]
        how = "refused" if row.refused else "measured"
        context = row.context or row.cell.context
        names = [row.settings["model"], row.versions["device"]]
        write.writerow([how, *names, *cell, context, *found, row.acceptance, *memory, row.refused])
    return out.getvalue()


def compare(rows: Sequence[Row], old: Sequence[Row], name: str) -> Table:
    """New over old, cell by cell; with a ~ where the ranges of the repeats overlap, so that nothing may have changed.

    The old row of a cell is its latest. A memory ratio needs equal contexts, otherwise it is n/a.
    """
    latest = {row.cell: row for row in sorted(old, key=lambda row: row.date) if not row.refused}
    made = Table(
        title=f"new / {name}", title_justify="left", caption="~: the ranges of the repeats overlap", caption_justify="left"
    )
    for head in (*_cell_heads(), "context", "prefill tok/s", "decode tok/s", "TTFT", "accepted", "peak memory", "J/token"):
        made.add_column(head, justify="left" if head == "kv" else "right", no_wrap=True)
    for row in rows:
        before = latest.get(row.cell)
        if row.refused or before is None:
            why = "refused now" if row.refused else "not in the file"
            made.add_row(*_cell(row), str(row.context or row.cell.context or ""), why, *[""] * 5)
            continue
        prefill, decode, ttft, energy = (
            _ratio(getattr(row, f), getattr(before, f)) for f in ("prefill", "decode", "ttft", "energy")
        )
        accepted = [_NONE if a is None else f"{a:.1%}" for a in (before.acceptance, row.acceptance)]
        made.add_row(
            *_cell(row),
            str(row.context),
            prefill,
            decode,
            ttft,
            " -> ".join(dict.fromkeys(accepted)),
            _memory_ratio(row, before),
            energy,
        )
    return made


def differences(rows: Sequence[Row], old: Sequence[Row]) -> list[str]:
    """Differences between the settings and versions of the new rows and those of the old rows of the same cells."""
    new, wanted = rows[0], {row.cell for row in rows}
    ours = {**new.settings, **new.versions}
    found = []
    for field, value in ours.items():
        theirs = list(dict.fromkeys({**row.settings, **row.versions}.get(field) for row in old if row.cell in wanted))
        if theirs and theirs != [value]:
            found.append(f"{field}: {', '.join(map(str, theirs))} -> {value}")
    return found


def _caption(row: Row) -> str:
    given = row.settings
    return (
        f"measured: median (least..largest) of {given['repeats']} repeats after {given['warmup']} warm-up, greedy, "
        f"text: {given['corpus']}; depth is in no rate"
    )


def _cell_heads() -> tuple[str, ...]:
    return tuple("K" if name == "draft" else name for name in CELL)


def _cell(row: Row) -> list[str]:
    return [str(getattr(row.cell, name)) for name in CELL]


def _spread(spread: Spread | None, scale: float = 1.0, digits: int = 1) -> str:
    if spread is None:
        return _NONE
    if spread.median * scale >= 1000:
        digits = 0
    median, low, high = (f"{value * scale:.{digits}f}" for value in (spread.median, spread.low, spread.high))
    return f"{median} ({low}..{high})"


def _ratio(new: Spread | None, old: Spread | None) -> str:
    if new is None or old is None or not old.median:
        return _NONE
    return f"{new.median / old.median:.3f}x" + (" ~" if new.overlaps(old) else "")


def _memory_ratio(new: Row, old: Row) -> str:
    if not (new.memory and old.memory and new.memory.bytes and old.memory.bytes):
        return _NONE
    alike = (new.memory.what, new.context) == (old.memory.what, old.context)
    return f"{new.memory.bytes / old.memory.bytes:.3f}x" if alike else _NONE
