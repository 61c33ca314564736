"""Held-out loss of the bundled model, document by document through the engine's own prefill, beside the n-gram baseline.

    make heldout      # or: python weights/training/heldout_tiny.py

Scores exactly what `ngram_baseline.py` scores: each held-out document's bytes, after `<|endoftext|>` and without the
closing one. Windows of `--window` tokens keep half a window of history. Also counts how many MTP drafts (K = 3, greedy) are
accepted on continuations of the held-out documents. Writes `heldout.json` beside the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rich.progress import track
from tiny_corpus import build_corpus
from tiny_tokenizer import TINY_DIR

from ninfer_jax import Engine, EngineConfig, SamplingParams


def document_nats(engine: Engine, ids: list[int], window: int) -> float:
    """Sum of -log p over the document's tokens; ids begin with `<|endoftext|>`, which is only history."""
    total, scored, valid = 0.0, 0, engine.tokenizer.vocab_size
    while scored < len(ids) - 1:
        start = max(0, scored - window // 2)
        part = ids[start : start + window + 1]
        logits = engine.score(part[:-1])[:, :valid].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        fresh = range(scored - start, len(part) - 1)
        total -= sum(logp[t, part[t + 1]] for t in fresh)
        scored = start + len(part) - 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY_DIR)
    parser.add_argument("--window", type=int, default=2048)
    args = parser.parse_args()
    corpus = build_corpus()
    engine = Engine.load(args.model, EngineConfig(context=args.window + 64, prefill_chunk=512, slots=1, draft=3))
    end = engine.tokenizer.token_id("<|endoftext|>")
    nats: dict[str, float] = {}
    size: dict[str, int] = {}
    drafted = accepted = 0
    for document in track(corpus.heldout, description="held-out documents"):
        ids = [end, *engine.tokenizer.encode(document.text)]
        nats[document.kind] = nats.get(document.kind, 0.0) + document_nats(engine, ids, args.window)
        size[document.kind] = size.get(document.kind, 0) + len(document.text.encode())
        stats = engine.generate(ids[:200], SamplingParams(temperature=0, max_new_tokens=256, ignore_eos=True)).stats
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    result = {
        "nats_per_byte": round(sum(nats.values()) / sum(size.values()), 4),
        "nats_per_byte_by_kind": {kind: round(nats[kind] / size[kind], 4) for kind in nats},
        "heldout_bytes": sum(size.values()),
        "window": args.window,
        "greedy_draft_acceptance_k3": round(accepted / drafted, 4),
        "drafted": drafted,
    }
    (args.model / "heldout.json").write_text(json.dumps(result, indent=1) + "\n")
    baseline = json.loads((TINY_DIR / "ngram.json").read_text())["nats_per_byte"]
    print(json.dumps(result, indent=1))
    print(f"order-5 byte n-gram on the same split: {baseline} nats/byte")


if __name__ == "__main__":
    main()
