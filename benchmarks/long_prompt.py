"""A long prompt beside running answers: how long these wait between two pieces, in chunks and rounds of the device and in seconds.

    python benchmarks/long_prompt.py --tokens 100000 --context 102400

The bundled model, or any other; each answer goes on until the prompt has its first token.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ninfer_jax import AsyncEngine, EngineConfig, SamplingParams


def main(
    model: Annotated[str, typer.Option(help="Model directory, or tiny.")] = "tiny",
    tokens: Annotated[int, typer.Option(help="Length of the long prompt.")] = 100_000,
    context: Annotated[int, typer.Option(help="Tokens that a slot may have.")] = 102_400,
    answers: Annotated[int, typer.Option(help="Answers under way, 1 to 3.")] = 3,
    draft: Annotated[int, typer.Option(help="Tokens drafted a round.")] = 0,
) -> None:
    """Print a table of waits."""
    config = EngineConfig(context=context, slots=answers + 1, draft=draft, pool=context + 8192 * answers)
    with AsyncEngine.open(Path(model) if model != "tiny" else "tiny", config) as engine:
        done = engine.call(lambda inner: inner.runner.counts).result()
        rng, waits = np.random.default_rng(0), [[] for _ in range(answers)]
        settings = SamplingParams(temperature=0, max_new_tokens=7000, ignore_eos=True)
        running = [engine.submit(rng.integers(0, 900, 20).tolist(), settings) for _ in range(answers)]

        def read(at: int) -> None:
            last = None
            for _ in running[at]:
                now = (time.perf_counter(), done.chunks, done.rounds)
                if last is not None:
                    waits[at].append([b - a for a, b in zip(last, now, strict=True)])
                last = now

        readers = [threading.Thread(target=read, args=(at,)) for at in range(answers)]
        for reader in readers:
            reader.start()
        while engine.load().numbers["engine_tokens"] < 30 * answers:
            time.sleep(0.05)
        alone = [len(w) for w in waits]
        started = time.perf_counter()
        stats = engine.generate(rng.integers(0, 900, tokens).tolist(), SamplingParams(temperature=0, max_new_tokens=1)).stats
        beside = [w[n - 1 :] for w, n in zip(waits, alone, strict=True)]
        taken = time.perf_counter() - started
        for one in running:
            one.cancel()
        for reader in readers:
            reader.join()
        before = [w[: n - 1] for w, n in zip(waits, alone, strict=True)]
        print(
            f"{tokens} tokens prefilled in {taken:.1f} s ({stats.prefill_s:.1f} s from the first chunk), {answers} answers beside"
        )
        for name, rows in (("alone", before), ("beside", beside)):
            every = np.array([row for one in rows for row in one])
            seconds, chunks, rounds = every.T
            print(
                f"{name:7s} pieces {len(every):6d}  wait: median {np.median(seconds):.3f} s, longest {seconds.max():.3f} s, "
                f"at most {int(chunks.max())} chunks and {int(rounds.max())} rounds"
            )


if __name__ == "__main__":
    typer.run(main)
