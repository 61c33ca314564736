"""What the CPU comparison writes: one table for prefill and one for decoding, as Markdown, and both as a picture."""

from __future__ import annotations

import platform
import statistics
from pathlib import Path
from typing import Any

OURS = "ninfer-jax"
# tokens a second of every repeat: kind ("prefill" or "decode") -> tokens in the prompt or context -> engine -> values
Rates = dict[str, dict[int, dict[str, list[float]]]]
TITLES = {
    "prefill": "Prefill, tokens a second by length of the prompt",
    "decode": "Decode, tokens a second by tokens in the context",
}


def table(rates: Rates, kind: str) -> list[list[str]]:
    """Headings and one row an engine: for each length the median with its range, and our median over it."""
    columns = rates[kind]
    lines = [["engine"] + [heading for length in columns for heading in (f"{length:,}", "ours is")]]
    for engine in next(iter(columns.values())):
        line = [engine]
        for values in columns.values():
            middle = statistics.median(values[engine])
            line += [
                f"{middle:.1f} ({min(values[engine]):.1f} to {max(values[engine]):.1f})",
                f"{statistics.median(values[OURS]) / middle:.2f}x",
            ]
        lines.append(line)
    return lines


def markdown(rates: Rates, facts: dict[str, Any]) -> str:
    """Both tables for docs/benchmarks.md, with what they were measured on."""
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    load = f"load average {facts['load_before']:.1f} before and {facts['load_after']:.1f} after"
    threads = f"{facts['threads']} thread" + "s" * (facts["threads"] > 1)
    agreed = ", ".join(f"{name} {difference:.0e}" for name, difference in facts["differences"].items() if name != "transformers")
    parts = [
        f"Measured {facts['date']} on {facts['machine']}, {threads}, {load}; {versions}. "
        f"Medians of {facts['repeats']} interleaved repeats with their range; {facts['steps']} decode steps a repeat. "
        f"Largest difference to transformers' log-probabilities beforehand, in nats: {agreed}."
    ]
    for kind in (k for k in TITLES if rates[k]):
        head, *lines = table(rates, kind)
        parts += ["", f"{TITLES[kind]}:", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        parts += ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(parts) + "\n"


def plot(rates: Rates, path: Path, title: str) -> None:
    """Tokens a second against length, one line an engine, bars from the slowest to the fastest repeat."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [k for k in TITLES if rates[k]]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(6.5 * len(kinds), 4.6), squeeze=False, layout="constrained")
    for ax, kind in zip(axes[0], kinds, strict=True):
        lengths = list(rates[kind])
        for engine in rates[kind][lengths[0]]:
            values = [rates[kind][length][engine] for length in lengths]
            middle = [statistics.median(v) for v in values]
            spread = [
                [m - min(v) for m, v in zip(middle, values, strict=True)],
                [max(v) - m for m, v in zip(middle, values, strict=True)],
            ]
            quantised = engine.endswith(("q8_0", "int4"))
            ax.errorbar(
                lengths,
                middle,
                spread,
                label=engine,
                marker="o",
                markersize=4,
                capsize=3,
                linewidth=2.4 if engine == OURS else 1.4,
                linestyle="--" if quantised else "-",
            )
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.set_ylim(bottom=0)
        ax.set_xlabel("tokens in the prompt" if kind == "prefill" else "tokens in the context")
        ax.set_ylabel("tokens a second")
        ax.set_title(kind)
        ax.grid(alpha=0.3)
    axes[0][0].legend(title="dashed: quantised weights", fontsize=8, title_fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def machine() -> str:
    """Processor model and the widest vector instructions, in words."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), platform.processor()
    )
    wide = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in text), "")
    return f"{model} ({wide})" if wide else model
