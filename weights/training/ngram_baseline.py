"""How well counting does on the held-out text: interpolated byte n-gram models of order 5, in nats per byte.

The bundled model must beat these figures to count as trained. Two estimators are tried on the same counts of the
training split (plain documents, without the conversations) and the better one is kept:

* Jelinek-Mercer (Jelinek & Mercer 1980): p(c|h) = sum_n w_n p_n(c|h_n), with one weight vector per length and
  log2(count) of the longest context seen, fitted by EM on every 20th training document with counts from the others;
* interpolated modified Kneser-Ney (Chen & Goodman 1999): three discounts per order, continuation counts below the top.

A document starts with four zero bytes of context, and only its own bytes are scored (its end is not).

    python weights/training/ngram_baseline.py          # about five seconds; writes weights/tiny/ngram.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from tiny_corpus import Document, build_corpus

ORDER = 5
EM_ROUNDS = 30
RESULT = Path(__file__).resolve().parent.parent / "tiny" / "ngram.json"


def windows(documents: list[Document]) -> np.ndarray:
    """`uint64[bytes]`: every byte (lowest 8 bits) with the four before it (higher bits, nearest lowest)."""
    parts = []
    for document in documents:
        padded = np.frombuffer(bytes(ORDER - 1) + document.text.encode(), np.uint8).astype(np.uint64)
        size = len(padded) - ORDER + 1
        parts.append(sum(padded[ORDER - 1 - back : ORDER - 1 - back + size] << np.uint64(8 * back) for back in range(ORDER)))
    return np.concatenate(parts)


def suffix(keys: np.ndarray, order: int) -> np.ndarray:
    """The n-gram of length `order` (its last byte the predicted one) inside each window."""
    return keys & np.uint64((1 << 8 * order) - 1)


class Table:
    """Sorted keys with values; absent keys read 0."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = keys, values

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.values[at], 0).astype(np.float64)


def summed(keys: np.ndarray, weights: np.ndarray) -> Table:
    unique, inverse = np.unique(keys, return_inverse=True)
    return Table(unique, np.bincount(inverse, weights, len(unique)))


class JelinekMercer:
    def __init__(self, train: list[Document]) -> None:
        kept = [d for i, d in enumerate(train) if i % 20]
        self.count(windows(kept))
        # before EM: equal weights over the orders whose context was seen
        longest = np.arange(32 * (ORDER + 1)) // 32
        self.weights = (np.arange(ORDER + 1) <= longest[:, None]) / (longest[:, None] + 1.0)
        components, buckets = self.components(windows([d for i, d in enumerate(train) if i % 20 == 0]))
        for _ in range(EM_ROUNDS):
            posterior = components * self.weights[buckets]
            posterior /= posterior.sum(1, keepdims=True)
            for bucket in np.unique(buckets):
                self.weights[bucket] = posterior[buckets == bucket].mean(0)
        self.count(windows(train))

    def count(self, keys: np.ndarray) -> None:
        self.grams, self.contexts = [], []
        for order in range(1, ORDER + 1):
            unique, counts = np.unique(suffix(keys, order), return_counts=True)
            self.grams.append(Table(unique, counts))
            self.contexts.append(summed(unique >> np.uint64(8), counts))

    def components(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Estimates `[n, ORDER + 1]` (uniform first) and, per row, the bucket that picks the weights."""
        columns, buckets = [np.full(len(keys), 1 / 256)], np.zeros(len(keys), np.int64)
        for order in range(1, ORDER + 1):
            gram = suffix(keys, order)
            total = self.contexts[order - 1](gram >> np.uint64(8))
            columns.append(np.divide(self.grams[order - 1](gram), total, out=np.zeros(len(keys)), where=total > 0))
            buckets = np.where(total > 0, 32 * order + np.log2(np.maximum(total, 1)).astype(np.int64), buckets)
        return np.stack(columns, 1), buckets

    def probability(self, keys: np.ndarray) -> np.ndarray:
        components, buckets = self.components(keys)
        return (components * self.weights[buckets]).sum(1)


class KneserNey:
    def __init__(self, train: list[Document]) -> None:
        unique, counts = np.unique(suffix(windows(train), ORDER), return_counts=True)
        self.levels = []
        for order in range(ORDER, 0, -1):
            tally = np.bincount(np.minimum(counts, 5), minlength=6)
            n1, n2, n3, n4 = (float(max(t, 1)) for t in tally[1:5])
            y = n1 / (n1 + 2 * n2)
            discounts = np.clip([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0, [0, 1, 2, 3])
            if n1 < 50:  # nearly every single byte occurs often, so the estimate of the discounts has nothing to go by
                discounts = np.array([0.0, 0.5, 0.5, 0.5])
            taken = discounts[np.minimum(counts, 3)]
            context = unique >> np.uint64(8)
            self.levels.append((Table(unique, counts - taken), summed(context, counts), summed(context, taken)))
            # one order down: in how many different contexts does the shorter n-gram occur
            unique, counts = np.unique(suffix(unique, order - 1), return_counts=True)
        self.levels.reverse()

    def probability(self, keys: np.ndarray) -> np.ndarray:
        p = np.full(len(keys), 1 / 256)
        for order, (rest, total, taken) in enumerate(self.levels, 1):
            gram = suffix(keys, order)
            n = total(gram >> np.uint64(8))
            seen = np.maximum(n, 1)
            p = np.where(n > 0, (rest(gram) + taken(gram >> np.uint64(8)) * p) / seen, p)
        return p


def main() -> None:
    corpus = build_corpus()
    sizes = {k: sum(len(d.text.encode()) for d in corpus.heldout if d.kind == k) for k in ("play", "code")}
    results = {}
    for name, model in (("jelinek-mercer", JelinekMercer), ("kneser-ney", KneserNey)):
        fitted = model(corpus.train)
        # every distribution must sum to one: checked on a few contexts of the held-out text
        for key in windows(corpus.heldout)[::5000]:
            row = (key & ~np.uint64(255)) | np.arange(256, dtype=np.uint64)
            if abs(fitted.probability(row).sum() - 1) > 1e-9:
                raise ValueError(f"{name}: probabilities after context {key >> np.uint64(8):#x} do not sum to 1")
        nats = {
            kind: -float(np.log(fitted.probability(windows([d for d in corpus.heldout if d.kind == kind]))).sum()) for kind in sizes
        }
        per_byte = {kind: nats[kind] / sizes[kind] for kind in sizes} | {"all": sum(nats.values()) / sum(sizes.values())}
        results[name] = per_byte
        for kind, value in per_byte.items():
            print(f"{name:15s}{kind:5s}{value:.4f} nats per byte {value / math.log(2):.4f} bits per byte")
    best = min(results, key=lambda name: results[name]["all"])
    print("kept:", best)
    RESULT.write_text(
        json.dumps(
            {
                "order": ORDER,
                "estimator": best,
                "nats_per_byte": round(results[best]["all"], 5),
                "nats_per_byte_by_kind": {k: round(results[best][k], 5) for k in sizes},
                "heldout_bytes": sum(sizes.values()),
                "heldout_bytes_by_kind": sizes,
                "train_bytes": sum(len(d.text.encode()) for d in corpus.train),
                "corpus_sha256": corpus.sha256,
                "others": {n: round(r["all"], 5) for n, r in results.items() if n != best},
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
