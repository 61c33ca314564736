"""An engine over an artifact on a CPU: what it says and how fast, and the memory it takes; one JSON object.

python -m benchmarks.shapes.speak ARTIFACT CONTEXT DRAFT PROMPT_TOKENS MAX_NEW
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.programs.plan import nbytes, resident_bytes

SEED = 1


def main(artifact: str, context: str, draft: str, prompt: str, max_new: str) -> None:
    began = time.perf_counter()
    # The digests of what was just written are left out: they say nothing about speed.
    engine = Engine.load(artifact, EngineConfig(context=int(context), slots=1, draft=int(draft), kernels="cpu"), verify=False)
    loaded = time.perf_counter()
    ids = np.random.default_rng(SEED).integers(0, engine.tokenizer.vocab_size, int(prompt)).tolist()
    greedy = SamplingParams(temperature=0, max_new_tokens=int(max_new), ignore_eos=True)
    stamps, tokens = [], []
    for piece in engine.stream(ids, greedy):
        stamps.append(time.perf_counter())
        tokens += piece.tokens
    after_first = len(tokens) - 1
    said = {
        "tokens": tokens,
        "load_s": loaded - began,
        "first_token_s": stamps[0] - loaded,
        "tokens_per_s": after_first / (stamps[-1] - stamps[0]),
        "weights_bytes": sum(nbytes(p) for p in engine.runner.pool.parameters),
        "resident_bytes": resident_bytes(engine.programs),
        **memory(),
    }
    print(json.dumps(said))


def memory() -> dict[str, int]:
    """Bytes of this process: `peak` resident, and resident now by what is behind them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
    return {"peak": found["VmHWM"], "anonymous": found["RssAnon"], "files": found["RssFile"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
