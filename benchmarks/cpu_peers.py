"""Prefill and decode speed of this engine and its peers on the CPU, in one run on one checkpoint.

    pip install -e '.[bench]'      # torch, transformers, llama.cpp and ONNX Runtime at the pinned versions
    python benchmarks/cpu_peers.py [--plot cpu_peers.png]      # the whole matrix
    python benchmarks/cpu_peers.py --quick                     # one length, float32 engines only

First each engine continues one prompt greedily and transformers scores all continuations, those of quantised weights with
the numbers that these stand for; nothing is timed when log-probabilities differ by more than the tolerance. Then every
engine, in a process of its own, prefills prompts and decodes at several depths, repeatedly and in turns, so that a
disturbance of the machine meets all of them. KV caches are float32 everywhere. Prints two tables; writes them as Markdown,
and everything measured as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

jax.config.update("jax_platforms", "cpu")

from peer_report import OURS, TITLES, Rates, machine, markdown, plot, table  # noqa: E402  (a sibling of this script)
from peers import PEERS  # noqa: E402
from random_checkpoint import make_checkpoint, prompt_ids  # noqa: E402

from ninfer_jax import tables  # noqa: E402

REFERENCE = "transformers"
COMPARED = 16
# Largest difference in nats. float32 sums in other orders differ by about 2e-5 here. Both quantised engines also round
# activations to eight bits, which transformers does not: 0.2 (measured). Other numbers are other models: the int4 engine's
# tokens scored with the float32 weights differ by 4.6.
TOLERANCE = {"float32": 2e-4, "w8": 5e-3, "q4": 5e-3, "q8_0": 0.5, "int4": 0.5}
REOPENED = 512  # a session this long or shorter is cheap to fill anew in every turn, so that its depth stays what it is
SETTLE = 0.1  # seconds between two peers' turns: for 5 to 35 ms threads of the one before still wait in a loop (measured)
_console = Console()


@dataclass(frozen=True)
class Length:
    """A prompt's tokens, and what is timed: its prefill, and `steps` decode steps after it (0: none). `anew`: filled in
    every turn; else once, and the context grows by a turn's steps."""

    tokens: int
    prefill: bool
    steps: int
    anew: bool


def lengths(prefill: Sequence[int], depths: Sequence[int], steps: int) -> list[Length]:
    """The matrix, shortest prompt first."""
    return [
        Length(n, n in prefill, steps if n in depths else 0, n in prefill or n <= REOPENED) for n in sorted({*prefill, *depths})
    ]


def capacity(matrix: Sequence[Length], repeats: int) -> int:
    """Tokens that the longest session comes to: warm-up, untimed steps, and up to two that come with a prefill."""
    return max(m.tokens + 2 + (1 if m.anew else repeats + 1) * (m.steps + 1) for m in matrix)


class Worker:
    """A peer in its own process; `call` waits for its answer."""

    def __init__(self, name: str, checkpoint: Path, threads: int, context: int, log: Path):
        script = Path(__file__).with_name("peers.py")
        # OpenMP's waiting is left as it is: it spins for a moment between operations, which torch and llama.cpp need.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)}
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            [sys.executable, str(script), name, str(checkpoint), str(threads), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )
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
    """Largest difference between a peer's log-probabilities and transformers' of the same tokens and weights; SystemExit
    beyond the tolerance. The first token checks prefill, the others decode steps."""
    differences = {}
    for name, worker in workers.items():
        weights = PEERS[name].weights
        tokens, logprobs = worker.call("greedy", prompt, COMPARED)
        reference = workers[REFERENCE].call("score", prompt, tokens, weights)
        if len(tokens) != COMPARED:
            raise SystemExit(f"{name} gave {len(tokens)} tokens with log-probabilities instead of {COMPARED}: nothing was timed")
        differences[name] = max(abs(a - b) for a, b in zip(logprobs, reference, strict=True))
        _console.print(f"{name}: log-probabilities within {differences[name]:.1e} of transformers with {weights} weights")
        if differences[name] > TOLERANCE[weights]:
            limit = f"more than {TOLERANCE[weights]:.0e}"
            raise SystemExit(f"{name} differs from transformers by {differences[name]:.1e}, {limit}: nothing was timed")
    return differences


def measure(workers: dict[str, Worker], matrix: Sequence[Length], repeats: int, seed: int) -> Rates:
    """Tokens a second of every repeat, in turns; the first turn of each length is warm-up and thrown away."""
    rates: Rates = {kind: {} for kind in TITLES}
    names = list(workers)
    for turn, length in track([(t, m) for m in matrix for t in range(repeats + 1)], "measuring", console=_console):
        prompt = prompt_ids(length.tokens, seed)
        # Another peer goes first every time: what follows a peer's turn (heat, caches) meets each of the others.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(SETTLE)
            if length.anew or turn == 0:
                seconds = workers[name].call("prefill", prompt)
                if length.prefill and turn:
                    rates["prefill"].setdefault(length.tokens, {n: [] for n in names})[name].append(length.tokens / seconds)
            if length.steps:
                seconds = workers[name].call("decode", length.steps)
                if turn:
                    rates["decode"].setdefault(length.tokens, {n: [] for n in names})[name].append(length.steps / seconds)
    return rates


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; SystemExit with one line for what does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    available = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "ninfer-jax-bench", help="where the checkpoint is kept"
    )
    parser.add_argument(
        "--threads", type=int, default=available, help=f"threads of every peer (default: the {available} cores allowed)"
    )
    parser.add_argument("--repeats", type=int, help="measured repeats of every peer (default 5; quick 3)")
    parser.add_argument("--prefill", type=int, nargs="+", default=[128, 512, 2048], help="prompts to time, in tokens")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[16, 2048, 8192], help="tokens in the context when decoding is timed"
    )
    parser.add_argument("--steps", type=int, default=32, help="decode steps a repeat")
    parser.add_argument("--quick", action="store_true", help="prefill of 512, 128 steps after it, float32 engines")
    parser.add_argument("--tiny", action="store_true", help="a model of 2M parameters and short prompts: says nothing about speed")
    parser.add_argument("--seed", type=int, default=0, help="of checkpoint and prompt")
    parser.add_argument(
        "--only", nargs="+", choices=list(PEERS), default=list(PEERS), help=f"peers to run; {REFERENCE} always checks"
    )
    parser.add_argument("--out", type=Path, default=Path("cpu_peers"), help="stem of the .json and .md files")
    parser.add_argument("--plot", type=Path, help="the tables as a picture, a .png")
    options = parser.parse_args(arguments)
    if options.threads != available:
        # XLA sizes its thread pool by the cores it may use and has no other setting.
        raise SystemExit(
            f"--threads is {options.threads} but {available} cores are allowed: use `taskset -c 0-{options.threads - 1}` as well"
        )
    options.repeats = (3 if options.quick else 5) if options.repeats is None else options.repeats
    for name in ("repeats", "steps", "prefill", "depths"):
        value = getattr(options, name)
        if min([value] if isinstance(value, int) else value) < 1:
            raise SystemExit(f"--{name} is {value}, it must be at least 1")
    peers = {*options.only, OURS, REFERENCE}
    if options.quick:
        options.prefill, options.depths, options.steps = [512], [512], 128
        peers = {name for name in peers if PEERS[name].weights == "float32"}
    if options.tiny:
        options.prefill, options.depths, options.steps = [24, 70], [8, 70], 2
    options.peers = [name for name in PEERS if name in peers]
    return options


def main() -> None:
    options = parse()
    checkpoint = make_checkpoint(options.cache, options.seed, "tiny" if options.tiny else "150m")
    matrix = lengths(options.prefill, options.depths, options.steps)
    compared = prompt_ids(24 if options.tiny else 512, options.seed)
    context = max(capacity(matrix, options.repeats), len(compared) + COMPARED)
    load_before = os.getloadavg()[0]
    workers: dict[str, Worker] = {}
    try:
        for name in options.peers:
            _console.print(f"loading {name}")
            workers[name] = Worker(name, checkpoint, options.threads, context, options.cache / f"{name.replace(' ', '-')}.log")
        differences = compare(workers, compared)
        rates = measure(workers, matrix, options.repeats, options.seed)
    finally:
        for worker in workers.values():
            worker.close()
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "threads": options.threads,
        "repeats": options.repeats,
        "steps": options.steps,
        "seed": options.seed,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "versions": {k: v for w in workers.values() for k, v in w.versions.items()},
        "differences": differences,
    }
    for kind in (k for k in TITLES if rates[k]):
        head, *lines = table(rates, kind)
        shown = Table(*head, title=TITLES[kind])
        for line in lines:
            shown.add_row(*line)
        tables.show(_console, shown)
    written = [options.out.with_suffix(".json"), options.out.with_suffix(".md")]
    written[0].write_text(json.dumps(facts | {"tokens_per_second": rates}, indent=1), encoding="utf-8")
    written[1].write_text(markdown(rates, facts), encoding="utf-8")
    if options.plot:
        plot(rates, options.plot, f"{facts['machine']}, threads: {options.threads}, medians of {options.repeats} repeats")
        written.append(options.plot)
    _console.print(f"written: {', '.join(str(path) for path in written)}")


if __name__ == "__main__":
    main()
