"""A decode step's cost follows the filled length and not the capacity: measured on the bundled model.

    python benchmarks/capacity.py [--plot capacity.png]      # the plot needs matplotlib, from the `train` extra

Two engines in one process, capacities 1,024 and 262,144, both with 100 tokens filled. Their steps alternate, and the
median of the paired ratios must be at most 1.2. Then steps of the large one with 1K, 4K and 16K tokens filled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

jax.config.update("jax_platforms", "cpu")

from ninfer_jax import tables  # noqa: E402
from ninfer_jax.config import MAX_CONTEXT, EngineConfig  # noqa: E402
from ninfer_jax.decoding import SamplingParams  # noqa: E402
from ninfer_jax.engine import Engine  # noqa: E402

SMALL, FILLED, LONGER = 1024, 100, (1024, 4096, 16_384)
LIMIT = 1.2
_console = Console()


class Stepper:
    """One completion in one engine, advanced a decode step at a time."""

    def __init__(self, model: Path, capacity: int, kv: str):
        self.engine = Engine.load(model, EngineConfig(context=capacity, slots=1, kv=kv, draft=0))
        self._vocab = self.engine.tokenizer.vocab_size
        self._stream = None

    def start(self, filled: int, steps: int) -> None:
        """Prefill `filled` random tokens; `step` may be called `steps` times afterwards."""
        self.stop()
        prompt = np.random.default_rng(filled).integers(0, self._vocab, filled).tolist()
        # The first piece comes with the first decode step: the token of the prefill and that of the step.
        params = SamplingParams(temperature=0.0, max_new_tokens=steps + 3, ignore_eos=True)
        self._stream = self.engine.stream(prompt, params)
        next(self._stream)

    def step(self) -> float:
        """Seconds of one decode step, host work included."""
        start = time.perf_counter()
        next(self._stream)
        return time.perf_counter() - start

    def stop(self) -> None:
        if self._stream is not None:
            self._stream.close()


def paired_ratios(large: Stepper, small: Stepper, pairs: int, warm_up: int = 10) -> tuple[list[float], list[float], list[float]]:
    """Steps of both in alternation, the order swapped every time: ratios large / small, and both lists of seconds."""
    for stepper in (large, small):
        stepper.start(FILLED, pairs + warm_up)
    ratios, of_large, of_small = [], [], []
    for i in range(pairs + warm_up):
        first, second = (large, small) if i % 2 else (small, large)
        times = {first: first.step(), second: second.step()}
        if i >= warm_up:
            of_large.append(times[large])
            of_small.append(times[small])
            ratios.append(times[large] / times[small])
    return ratios, of_large, of_small


def plot(path: Path, filled: list[int], milliseconds: list[float]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(filled, milliseconds, marker="o")
    axes.set(xlabel="tokens filled", ylabel="ms a decode step", title="Bundled model, capacity 262,144", xscale="log", ylim=0)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bundled = Path(__file__).resolve().parent.parent / "weights" / "tiny"
    parser.add_argument("--model", type=Path, default=bundled, help="checkpoint directory (default: the bundled model)")
    parser.add_argument("--kv", default="f32", help="KV format")
    parser.add_argument("--pairs", type=int, default=200, help="paired steps")
    parser.add_argument("--steps", type=int, default=50, help="steps at each longer filled length")
    parser.add_argument("--longest", type=int, default=LONGER[-1], help="leave out filled lengths beyond this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    large, small = (Stepper(options.model, capacity, options.kv) for capacity in (MAX_CONTEXT, SMALL))
    ratios, of_large, of_small = paired_ratios(large, small, options.pairs)
    small.stop()
    ratio = statistics.median(ratios)
    figures = [(SMALL, FILLED, statistics.median(of_small)), (MAX_CONTEXT, FILLED, statistics.median(of_large))]
    for filled in (n for n in LONGER if n <= options.longest):
        large.start(filled, options.steps)
        figures.append((MAX_CONTEXT, filled, statistics.median(large.step() for _ in range(options.steps))))
    large.stop()

    table = Table(
        "capacity", "tokens filled", "ms a step (median)", title=f"load average {load:.1f}, {len(os.sched_getaffinity(0))} cores"
    )
    for capacity, filled, seconds in figures:
        table.add_row(f"{capacity:,}", f"{filled:,}", f"{seconds * 1e3:.2f}")
    tables.show(_console, table)
    _console.print(
        f"median of {len(ratios)} paired ratios, {MAX_CONTEXT:,} against {SMALL:,} with {FILLED} tokens filled: {ratio:.3f}"
    )
    if options.json:
        rows = [{"capacity": c, "filled": n, "seconds": s} for c, n, s in figures]
        options.json.write_text(json.dumps({"ratio": ratio, "load": load, "steps": rows}, indent=1), encoding="utf-8")
    if options.plot:
        of = [(n, s * 1e3) for c, n, s in figures if c == MAX_CONTEXT]
        plot(options.plot, [n for n, _ in of], [ms for _, ms in of])
    if ratio > LIMIT:
        raise SystemExit(f"the ratio is {ratio:.3f}, more than {LIMIT}: a step pays for capacity that nothing fills")


if __name__ == "__main__":
    main()
