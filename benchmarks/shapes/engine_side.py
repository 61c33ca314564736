"""The engine over an artifact: what it writes, what it drafts first and its logits.

python -m benchmarks.shapes.engine_side ARTIFACT IDS.npy OUT.npz DTYPE MAX_NEW PROMPT
"""

from __future__ import annotations

import sys
import time

import numpy as np

from ninfer_jax import Engine, EngineConfig, SamplingParams

DRAFT, CONTEXT, CHUNK = 3, 256, 64


def main(artifact: str, ids: str, out: str, dtype: str, max_new: str, prompt: str) -> None:
    tokens, began = np.load(ids).tolist(), time.perf_counter()
    engine = Engine.load(artifact, EngineConfig(context=CONTEXT, slots=1, prefill_chunk=CHUNK, draft=DRAFT, dtype=dtype, kv="f32"))
    loaded = time.perf_counter()
    greedy = SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)
    (first,) = engine.generate(tokens, greedy).tokens
    # What the MTP head proposed after that token; nobody has used the slot since.
    drafts = np.asarray(engine.runner.state.slots.drafts)[0]
    answer = engine.generate(prompt, SamplingParams(temperature=0, max_new_tokens=int(max_new)))
    generated = time.perf_counter()
    logits = engine.score(tokens)
    seconds = {"load": loaded - began, "generate": generated - loaded, "score": time.perf_counter() - generated}
    np.savez(out, first=first, drafts=drafts, tokens=answer.tokens, logits=logits, **{f"s_{k}": v for k, v in seconds.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
