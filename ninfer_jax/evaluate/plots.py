"""Pictures of the measures, PNG files small enough for a document."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ninfer_jax.evaluate.acceptance import Acceptance
from ninfer_jax.evaluate.divergence import Divergence
from ninfer_jax.evaluate.drift import Drift
from ninfer_jax.evaluate.needle import Cell
from ninfer_jax.evaluate.perplexity import Loss


def plot_losses(file: Path, losses: SequenceOf[Loss]) -> None:
    """A bar a format, its loss minus the first one's."""
    figure, axes = _figure()
    first = losses[0]
    axes.bar([loss.kv for loss in losses], [loss.nats_per_token - first.nats_per_token for loss in losses])
    axes.axhline(0, color="black", linewidth=0.8)
    title = f"Loss, windows of {first.window} tokens ({first.kv}: {first.nats_per_token:.4f})"
    axes.set(ylabel=f"nats a token above {first.kv}", title=title)
    _save(figure, file)


def plot_divergences(file: Path, results: SequenceOf[Divergence], reference: str) -> None:
    """KL over depth, a line a format."""
    figure, axes = _figure()
    for kv in dict.fromkeys(r.kv for r in results):
        own = [r for r in results if r.kv == kv and r.kl > 0]
        if own:
            axes.errorbar([r.depth for r in own], [r.kl for r in own], [r.kl_error for r in own], marker="o", capsize=3, label=kv)
    axes.set_yscale("log")
    axes.set(xlabel="tokens before the decode steps", ylabel="KL, nats a token", title=f"Decode steps against {reference} KV")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, file)


def plot_needles(file: Path, grids: Mapping[str, SequenceOf[Cell]], value: str = "found") -> None:
    """Heat maps, one a format: depth down, length across. value: "found", the share found, or "help", how much the needle
    lowers the answer's -log p, nats a token."""
    figure = Figure(figsize=(1.2 + 2.6 * len(grids), 3.2), layout="constrained")
    panels = figure.subplots(1, len(grids), squeeze=False)[0]
    image: Any = None
    for axes, (kv, cells) in zip(panels, grids.items(), strict=True):
        lengths, depths = sorted({c.length for c in cells}), sorted({c.depth for c in cells})
        shown = np.zeros((len(depths), len(lengths)))
        for c in cells:
            shown[depths.index(c.depth), lengths.index(c.length)] = c.found if value == "found" else c.help_nats
        low, high = (0, 1) if value == "found" else (-3, 3)
        image = axes.imshow(shown, aspect="auto", cmap="RdYlGn", vmin=low, vmax=high)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        axes.set(title=kv, xlabel="tokens")
        for (row, column), number in np.ndenumerate(shown):
            axes.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=8)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label="share found" if value == "found" else "help of the needle, nats a token")
    _save(figure, file)


def plot_drift(file: Path, points: SequenceOf[Drift]) -> None:
    """The worst layer's state error and the logits' error over position, by path."""
    figure, axes = _figure()
    for path in dict.fromkeys(p.path for p in points):
        own = [p for p in points if p.path == path]
        at = [p.position for p in own]
        line = axes.semilogy(at, [max(p.state_error) for p in own], marker="o", label=f"{path}: worst state")[0]
        axes.semilogy(at, [p.logits_error for p in own], "--", color=line.get_color(), label=f"{path}: logits")
    axes.set(xlabel="tokens read", ylabel="relative error", title=f"Against {points[0].reference}")
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    _save(figure, file)


def plot_acceptance(file: Path, results: SequenceOf[Acceptance]) -> None:
    """The share accepted of each draft of a round, a line for each format and K."""
    figure, axes = _figure()
    for r in results:
        label = f"{r.kv}, {r.drafter}, K = {r.draft}: {r.tokens_per_round:.2f} tokens a round"
        axes.plot(range(1, r.draft + 1), r.by_place, marker="o", label=label)
    axes.set(xlabel="draft", ylabel="share of rounds that accept it", ylim=(0, 1), title="Accepted drafts, greedy")
    axes.set_xticks(range(1, max(r.draft for r in results) + 1))
    axes.legend(fontsize=8)
    _save(figure, file)


def _figure():
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=90)
