"""Greedy answers with drafts equal greedy answers without: every K, every KV format, twenty prompts of 256 tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted import GREEDY, PROMPTS, config

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path

FORMATS = ("f32", "bf16", "int8", "rk8v4", "rk4v4", "rk4v4-e8")
pytestmark = [pytest.mark.engine, pytest.mark.bits, pytest.mark.full]


def load(draft: int, kv: str, slots: int = 1) -> Engine:
    return Engine.load(tiny_path(), EngineConfig(**config(draft, kv, slots)))


def answers(engine: Engine) -> list[list[int]]:
    return [c.tokens for c in engine.generate_many(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def plain_answers() -> Callable[[str], list[list[int]]]:
    """Greedy answers without drafts, computed once a format."""
    known: dict[str, list[list[int]]] = {}

    def of(kv: str) -> list[list[int]]:
        if kv not in known:
            known[kv] = answers(load(0, kv))
        return known[kv]

    return of


@pytest.mark.parametrize(
    ("draft", "kv"),
    [(k, kv) for kv in ("bf16", "rk4v4-e8") for k in (1, 2, 3, 4, 5)]
    + [(3, kv) for kv in FORMATS if kv not in ("bf16", "rk4v4-e8")],
)
def test_greedy_with_drafts_equals_greedy_without(draft, kv, plain_answers):
    engine = load(draft, kv)
    completions = engine.generate_many(PROMPTS, GREEDY)
    assert [c.tokens for c in completions] == plain_answers(kv)
    # The comparison means something only if drafts were both taken and refused.
    accepted, drafted = (sum(getattr(c.stats, name) for c in completions) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    if draft == 3 and kv == "f32":
        assert accepted / drafted >= 0.5  # what the bundled model's MTP head is trained for


def test_four_slots_equal_one(plain_answers):
    assert answers(load(3, "f32", slots=4)) == plain_answers("f32")
