"""The measures of `benchmarks/quality.py` that no library module has: repeats, bytes of recipes, what the role table says."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "kernels")]

from measures import recipes, repeats, show  # noqa: E402

from ninfer_jax.config import RECIPES  # noqa: E402

IDS, GIB = 500, 2**30


class Copier:
    """Expects what followed the last occurrence of the current token, where that is at most `sight` tokens back, e^9 times as
    much as any other id; else all ids alike."""

    tokenizer = types.SimpleNamespace(vocab_size=IDS)

    def __init__(self, sight: int):
        self.sight, self.read = sight, []

    def score(self, ids: list[int]) -> np.ndarray:
        self.read.append(list(ids))
        logits, last = np.zeros((len(ids), IDS + 6), np.float32), {}
        logits[:, IDS:] = 20  # rows that are no tokens
        for at, token in enumerate(ids):
            if token in last and at - last[token] <= self.sight:
                logits[at, ids[last[token] + 1]] = 9
            last[token] = at
        return logits


def test_repeats_help_as_far_as_the_model_sees(monkeypatch):
    """In a text without a token twice, nothing but the repeat can be copied."""
    monkeypatch.setattr(repeats, "DISTANCES", (64, 128, 256))
    text, told = list(range(IDS)), []
    known, unknown = math.log1p((IDS - 1) * math.exp(-9)), math.log(IDS)
    far, near = Copier(256), Copier(128)
    for model in (far, near):
        rows = repeats.measure(model, text, 4, lambda done, total: told.append((done, total)))
        assert [(r.source, r.distance) for r in rows] == [("text", 64), ("text", 128), ("text", 256), ("random", 64)]
        for row in rows[:3]:
            seen = row.distance <= model.sight
            assert row.first == pytest.approx(unknown, abs=1e-4) == row.without
            assert row.second == pytest.approx(known if seen else unknown, abs=1e-4)
            assert row.helps == pytest.approx([row.without - row.second] * 4, abs=1e-4)
        assert rows[3].without - rows[3].second > 0.8 * (unknown - known)
    assert told[-1] == (16, 16)
    assert far.read == near.read and len({tuple(ids) for ids in far.read}) == len(far.read)
    with pytest.raises(ValueError, match="the text has 300 tokens, repeats at 256 need 384"):
        repeats.measure(far, text[:300], 1)


def test_the_tokens_that_count(monkeypatch):
    """All of the stretch but its first: told by a model that charges each token its position."""
    monkeypatch.setattr(repeats, "DISTANCES", (100,))
    monkeypatch.setattr(repeats, "_nats", lambda engine, ids: np.arange(1.0, len(ids)))
    row, _ = repeats.measure(Copier(0), list(range(IDS)), 2)
    places = repeats.LEAD + np.arange(1, repeats.STRETCH)
    assert (row.first, row.second, row.without, row.helps) == (places.mean(), places.mean() + 100, places.mean() + 100, [0, 0])


def test_bytes_of_recipes_on_the_27b():
    """Half a byte and some scales for each weight of the 48 Gated DeltaNet layers' projections and of the embedding is what
    q4-quality takes more than q4; and it fits."""
    q4, finer, w8 = (recipes.weight_bytes(RECIPES[name]) for name in ("q4", "q4-quality", "w8"))
    assert finer == {**q4, "gdn": w8["gdn"], "embed": w8["embed"]}
    for role, weights in (("gdn", 48 * (5120 * 16_384 + 6144 * 5120)), ("embed", 248_320 * 5120)):
        assert 0.48 * weights < finer[role] - q4[role] < 0.54 * weights
    # All that is not weights took 5.27 GiB of the plan (docs/memory.md), of the 23.65 GiB that the card reports.
    assert sum(finer.values()) < (23.65 - 5.28) * GIB


def test_roles_are_ordered_by_what_their_bytes_are_worth():
    def row(role, bits, within, kl):
        sizes = {"small": (GIB, 2 * GIB), "large": (8 * GIB, 16 * GIB), "fine": (GIB // 8, GIB // 4), "all": (None, None)}[role]
        return {"role": role, "bits": bits, "in": within, "kl": kl, "kl_error": kl / 10, "bytes4": sizes[0], "bytes8": sizes[1]}

    rows = [
        row("large", 4, "alone", 0.009),
        row("large", 8, "alone", 0.001),
        row("small", 4, "alone", 0.003),
        row("small", 8, "alone", 0.001),
        row("fine", 4, "alone", 0.002),
        row("fine", 8, "alone", 0.001),
        row("all", 4, "q4", 0.0101),
        row("large", 8, "q4", 0.0022),
        row("small", 8, "q4", 0.0083),
        row("fine", 4, "q4", 0.0111),
    ]
    found = show.per_role(rows)
    assert [(r["role"], r["kept"], r["added"]) for r in found] == [("fine", 8, 0.125), ("small", 4, 1), ("large", 4, 8)]
    assert [r["worth"] for r in found] == pytest.approx([0.008, 0.002, 0.001])
    drafts = {"accepted": 30, "drafted": 60, "accepted_share": 0.5, "tokens_per_round": 2.5}
    lines = show.table("roles", [*rows, {"role": "mtp", "bits": 4, "in": "alone", **drafts}])
    assert "| `small` | 4 | 1.00 | 1.00 | 3,000.0 ± 300.0 | 1,000.0 ± 100.0 | 2,000 | 8 bits: 8,300.0 ± 830.0 |" in lines
    assert "all of `q4`: 10,100.0 ± 1,010.0" in lines and "| 4 bits | 30 of 60 | 50.0% | 2.50 |" in lines
