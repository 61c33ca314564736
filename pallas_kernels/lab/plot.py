"""Two rooflines of a card: thread instructions, which every kernel has, and multiply-adds on tensor cores."""

from __future__ import annotations

import math
from pathlib import Path

from pallas_kernels import targets
from pallas_kernels.lab.rows import Row

MARKERS = [*"osD^v<>Pp*hX8d", *((points, star, 0) for star in (1, 2) for points in (4, 5, 6, 8))]


def roofline(rows: list[Row], card: targets.Target, path: Path) -> None:
    """Write a PNG: an op is a colour, a case of it a marker. RuntimeError where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as e:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(16, max(6.0, 2 + 0.17 * len(rows))))
    on_tensor_cores = [r for r in rows if r.tensor_core_instructions]
    _roofs(left, card, [(card.issue_rate, "instruction issue", "-")], [r.thread_instructions / r.bytes_moved for r in rows])
    rates = [(card.tensor_16, "16-bit tensor cores", "-"), (card.tensor_8, "8-bit tensor cores", "--")]
    _roofs(right, card, rates, [r.multiply_adds / r.bytes_moved for r in on_tensor_cores])
    ops = list(dict.fromkeys(r.op for r in rows))
    seen: dict[str, int] = {}
    for row in rows:
        number = seen.setdefault(row.op, 0)
        seen[row.op] += 1
        look = {
            "marker": MARKERS[number % len(MARKERS)],
            "color": plt.get_cmap("tab10" if len(ops) <= 10 else "tab20")(ops.index(row.op)),
            "markeredgecolor": "black",
            "markeredgewidth": 0.5,
            "linestyle": "none",
            "alpha": 0.8,
            "label": f"{row.op}/{row.case}: {row.modelled_us:,.1f} us, {row.limit}",
        }
        seconds = row.modelled_us * 1e-6
        left.plot(row.thread_instructions / row.bytes_moved, row.thread_instructions / seconds, **look)
        if row in on_tensor_cores:
            right.plot(row.multiply_adds / row.bytes_moved, row.multiply_adds / seconds, **look)
    left.set(xlabel="thread instructions per byte moved", ylabel="thread instructions per second", title="instructions")
    right.set(xlabel="multiply-adds per byte moved", ylabel="multiply-adds per second", title="tensor cores")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(f"{card.description}: modelled from compiled code, not measured")
    figure.tight_layout()
    # The legend is outside: let the picture grow to hold it.
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _roofs(axes, card: targets.Target, rates: list[tuple[float, str, str]], at: list[float]) -> None:
    """The card's limits, from below the least intensity of `at` to beyond the largest and the bend of every roof."""
    at = at + [1.5 * rate / card.bandwidth for rate, *_ in rates]
    first, last = math.floor(16 * math.log2(min(at) / 1.5)), math.ceil(16 * math.log2(max(at) * 1.5))
    intensity = [2.0 ** (i / 16) for i in range(first, last + 1)]
    for rate, label, style in rates:
        roof = [min(rate, card.bandwidth * i) for i in intensity]
        axes.loglog(intensity, roof, style, color="gray", zorder=0)
        axes.annotate(label, (intensity[-1], roof[-1]), ha="right", va="bottom", fontsize=8, color="gray")
    start = (intensity[0], card.bandwidth * intensity[0])
    memory = f"memory, {card.bandwidth / 1e9:.0f} GB/s"
    axes.annotate(memory, start, (12, 0), textcoords="offset points", fontsize=8, color="gray")
    axes.grid(alpha=0.3, which="both")
