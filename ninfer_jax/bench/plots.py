"""Three pictures of a matrix: speed against depth, acceptance against K, memory against context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ninfer_jax.bench.results import Row

# What tells lines of a picture apart; the fields that are the same in all of them are left out of the legend.
_NAMES = {"kv": "kv", "draft": "K", "slots": "slots", "prompt": "prompt", "gen": "gen", "depth": "depth", "context": "context"}


def write(rows: Sequence[Row], folder: Path) -> tuple[list[Path], list[str]]:
    """PNGs of what `rows` have figures for: the paths written, and a line for each picture left out."""
    made, left_out = [], []
    rows = [row for row in rows if not row.refused]
    pictures = {
        "speed_by_depth": speed_by_depth,
        "acceptance_by_draft": acceptance_by_draft,
        "memory_by_context": memory_by_context,
    }
    for name, draw in pictures.items():
        figure = draw(rows)
        if figure is None:
            left_out.append(f"{name}.png: no cell has a figure for it")
            continue
        made.append(folder / f"{name}.png")
        figure.savefig(made[-1], dpi=150)
    return made, left_out


def speed_by_depth(rows: Sequence[Row]) -> Figure | None:
    """Prefill and decode in tokens a second, medians with the range of the repeats, against tokens filled before."""
    if not rows:
        return None
    figure, panels = _figure(rows, 2)
    common = ("kv", "draft", "slots", "context", "prompt")
    # Prefill has nothing to do with what is generated after it: of several lengths the last one's row is shown.
    for axes, what, by in zip(panels, ("prefill", "decode"), (common, (*common, "gen")), strict=True):
        for label, line in _lines([r for r in rows if getattr(r, what)], by, lambda r: r.cell.depth):
            spreads = [getattr(row, what) for row in line]
            error = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
            axes.errorbar([r.cell.depth for r in line], [s.median for s in spreads], error, marker="o", capsize=3, label=label)
        axes.set(xlabel="tokens filled before (depth)", ylabel=f"{what}, tokens/s", ylim=(0, None))
    return _finish(figure, panels)


def acceptance_by_draft(rows: Sequence[Row]) -> Figure | None:
    """Accepted drafts over drafts, of all repeats together, against drafts a round."""
    rows = [row for row in rows if row.acceptance is not None]
    if not rows:
        return None
    figure, panels = _figure(rows, 1)
    for label, line in _lines(rows, ("kv", "slots", "context", "prompt", "gen", "depth"), lambda r: r.cell.draft):
        panels[0].plot([r.cell.draft for r in line], [r.acceptance for r in line], marker="o", label=label)
    panels[0].set(
        xlabel="drafts a round (K)", ylabel="accepted / drafted", ylim=(0, 1), xticks=sorted({r.cell.draft for r in rows})
    )
    return _finish(figure, panels)


def memory_by_context(rows: Sequence[Row]) -> Figure | None:
    """Peak memory against the context that the engine was made for: its largest cell, as only the peak so far is known."""
    rows = [row for row in rows if row.memory and row.memory.bytes is not None]
    if not rows:
        return None

    def peak(row: Row) -> int:
        assert row.memory is not None and row.memory.bytes is not None
        return row.memory.bytes

    def context(row: Row) -> int:
        assert row.context is not None
        return row.context

    figure, panels = _figure(rows, 1)
    for label, line in _lines(sorted(rows, key=peak), ("kv", "draft", "slots"), context):
        panels[0].plot([context(r) for r in line], [peak(r) / 2**30 for r in line], marker="o", label=label)
    what = ", ".join(sorted({r.memory.what for r in rows if r.memory}))
    panels[0].set(xlabel="context of a slot, tokens", ylabel=f"GiB ({what})", ylim=(0, None))
    return _finish(figure, panels)


def _lines(rows: Sequence[Row], by: Sequence[str], x: Callable[[Row], int]) -> list[tuple[str, list[Row]]]:
    """Rows that agree in the fields `by`, each line sorted by x, the last row of each x, with its legend."""
    lines: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(getattr(row.cell, field) for field in by), {})[x(row)] = row
    differ = [i for i, _ in enumerate(by) if len({key[i] for key in lines}) > 1]
    names = [_NAMES[field] for field in by]
    return [(", ".join(f"{names[i]} {key[i]}" for i in differ), sorted(line.values(), key=x)) for key, line in lines.items()]


def _figure(rows: Sequence[Row], panels: int) -> tuple[Figure, list]:
    figure = Figure(figsize=(5.5 * panels + 1, 4), layout="constrained")
    first = rows[0]
    figure.suptitle(f"{first.settings['model']} on {first.versions['device']}: measured", fontsize=10)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _finish(figure: Figure, panels: list) -> Figure:
    most = 0
    for axes in panels:
        axes.grid(alpha=0.3)
        labels = len(axes.get_legend_handles_labels()[1])
        if labels > 1:
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
            most = max(most, (labels + 1) // 2)
    figure.set_figheight(4 + 0.17 * most)
    return figure
