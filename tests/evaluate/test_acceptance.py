"""Accepted drafts are counted as the engine's own statistics count them."""

from __future__ import annotations

import pytest

from ninfer_jax import SamplingParams
from ninfer_jax.evaluate.acceptance import cut_prompts, draft_acceptance


def test_counts(engine, ids):
    prompts = cut_prompts(ids, 3, 40)
    found = draft_acceptance(engine, prompts, 30)
    params = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
    stats = [engine.generate(p, params).stats for p in prompts]
    # Each continuation's last round is left out, which had at most the drafts that the token limit left.
    assert found.rounds == sum(s.rounds for s in stats) - 3
    assert found.drafted == 3 * found.rounds
    assert 0 <= sum(s.accepted for s in stats) - found.accepted <= 3 * 3
    assert found.accepted_share == found.accepted / found.drafted and found.tokens_per_round == 1 + found.accepted / found.rounds
    assert 1 >= found.by_place[0] >= found.by_place[1] >= found.by_place[2] > 0
    assert sum(found.by_place) * found.rounds == pytest.approx(found.accepted)


def test_prompts_are_spread_over_the_text():
    assert cut_prompts(range(100), 4, 10) == [list(range(n, n + 10)) for n in (0, 30, 60, 90)]
    assert cut_prompts(range(10), 1, 10) == [list(range(10))]
    with pytest.raises(ValueError, match="the text has 100 tokens, 11 prompts of 10 need 110"):
        cut_prompts(range(100), 11, 10)


def test_nothing_to_count(engine, coarse_engine, ids):
    with pytest.raises(ValueError, match="draft is 0"):
        draft_acceptance(coarse_engine, [ids[:10]], 30)
    with pytest.raises(ValueError, match="max_new is 2"):
        draft_acceptance(engine, [ids[:10]], 2)
