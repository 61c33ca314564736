"""The roofline: multiply-adds per byte against multiply-adds per second, the card's limits and each kernel's floor."""

from __future__ import annotations

from pathlib import Path

from pallas_kernels import targets
from pallas_kernels.lab.rows import Row


def roofline(rows: list[Row], card: targets.Target, path: Path) -> None:
    """Write a PNG. RuntimeError where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as e:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    intensity = [2.0**i for i in range(-4, 14)]
    for rate, label, style in ((card.tensor_16, "16-bit tensor cores", "-"), (card.tensor_8, "8-bit tensor cores", "--")):
        axes.loglog(intensity, [min(rate, card.bandwidth * i) for i in intensity], style, color="gray", label=label)
    for i, row in enumerate(r for r in rows if r.multiply_adds):
        x, y = row.multiply_adds / row.bytes_moved, row.multiply_adds / (row.modelled_us * 1e-6)
        axes.loglog(x, y, "o", color=f"C{i % 10}", label=f"{row.op}/{row.case} ({row.limit})")
    axes.set_xlabel("multiply-adds per byte moved")
    axes.set_ylabel("multiply-adds per second")
    axes.set_title(f"{card.description}: modelled from compiled code, not measured")
    axes.legend(fontsize=6, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
