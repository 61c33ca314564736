"""Drafting changes how fast an answer comes and nothing else: tokens, states and pages equal plain decoding's, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scripted import GREEDY, PROMPTS, compare_greedy, config, run

from ninfer_jax import SamplingParams
from ninfer_jax.config import MAX_DRAFT

pytestmark = [pytest.mark.engine, pytest.mark.bits]
K = MAX_DRAFT
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=120, seed=11, frequency_penalty=0.2, ignore_eos=True)


@pytest.fixture
def pair(engine_for):
    """The same engine without drafts, and with the most that a round may have, in two slots."""
    return engine_for(**config(0, "rk4v4-e8")), engine_for(**config(K, "rk4v4-e8", slots=2))


@pytest.fixture
def prompt(pair):
    return pair[0].tokenizer.encode(PROMPTS[0])


@pytest.fixture(scope="module")
def plain_run():
    """(engine, prompt, params) -> 120 tokens without drafts and the states after each; run once, and changed by nobody."""
    known = {}

    def of(engine, prompt, params):
        if repr(params) not in known:
            known[repr(params)] = run(engine, prompt, params, budget=120)
        return known[repr(params)]

    return of


def right(truth, k=K):
    """Drafts that will all be accepted (padded past the end of the known answer)."""
    return lambda tokens: (truth[len(tokens) : len(tokens) + k] + [0] * k)[:k]


def wrong_at(truth, position, k=K):
    """Drafts that are right up to `position` and wrong there."""

    def script(tokens):
        drafts = right(truth, k)(tokens)
        drafts[position] = (drafts[position] + 1) % 900
        return drafts

    return script


def assert_same_states(plain, drafted):
    shared = sorted(set(plain) & set(drafted))
    assert shared[-1] == max(drafted)
    for emitted in shared:
        for name, array in drafted[emitted].items():
            np.testing.assert_array_equal(array, plain[emitted][name], err_msg=f"{name} after {emitted} tokens")
    return shared


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["own", "right", *(f"wrong at {position}" for position in range(K))])
def test_states_after_every_round_equal_the_plain_run(pair, plain_run, prompt, params, kind):
    plain_engine, draft_engine = pair
    reference, plain = plain_run(plain_engine, prompt, params)
    truth = reference.tokens
    script = {"own": None, "right": right(truth)}.get(kind) or (wrong_at(truth, int(kind[-1])) if "wrong" in kind else None)
    sequence, drafted = run(draft_engine, prompt, params, script, budget=120)
    assert sequence.tokens == truth
    shared = assert_same_states(plain, drafted)
    if kind == "right":
        assert len(shared) == 1 + -(-119 // (K + 1))
    if "wrong" in kind:
        assert [b - a for a, b in itertools.pairwise(shared)][:-1] == [1 + int(kind[-1])] * (len(shared) - 2)


@pytest.mark.parametrize("inside", range(K + 1))
def test_an_end_token_inside_the_accepted_drafts(pair, plain_run, prompt, inside):
    """The completion ends with it, and the state is the plain run's: nothing behind it was consumed."""
    plain_engine, draft_engine = pair
    truth = plain_run(plain_engine, prompt, GREEDY)[0].tokens
    # An id whose first appearance lies `inside` positions into some round.
    end = next(t for at, t in enumerate(truth) if at > 1 and truth.index(t) == at and (at - 1) % (K + 1) == inside)
    params = SamplingParams(temperature=0, ignore_eos=True, stop_ids=(end,))
    reference, plain = run(plain_engine, prompt, params, budget=120)
    sequence, drafted = run(draft_engine, prompt, params, right(truth), budget=120)
    assert sequence.tokens == reference.tokens == truth[: truth.index(end) + 1]
    assert sequence.finish_reason == reference.finish_reason == "stop"
    assert_same_states(plain, drafted)


@pytest.mark.parametrize("room", range(1, K + 4))
def test_the_exact_context_limit(pair, prompt, room):
    plain_engine, draft_engine = pair
    long = (prompt * 60)[: plain_engine.context - room]
    params = SamplingParams(temperature=0, ignore_eos=True)
    reference, plain = run(plain_engine, long, params)
    sequence, drafted = run(draft_engine, long, params, right(reference.tokens) if room > 1 else None)
    assert sequence.tokens == reference.tokens and len(sequence.tokens) == room
    assert sequence.finish_reason == "length"
    assert_same_states(plain, drafted)


def test_greedy_answers_are_the_same(pair):
    compare_greedy(*pair)


def test_a_sampled_answer_is_the_same_with_drafts_and_beside_others(pair):
    check_beside_others(*pair)


@pytest.mark.full
def test_a_sampled_answer_is_the_same_beside_three_others(pair, engine_for):
    check_beside_others(pair[0], engine_for(**config(3, "rk4v4-e8", slots=4)))


def check_beside_others(plain_engine, crowd):
    alone = [plain_engine.generate(p, SAMPLED).tokens for p in PROMPTS[:4]]
    beside = crowd.generate_many(PROMPTS[:4], SAMPLED)
    assert [c.tokens for c in beside] == alone
    assert sum(c.stats.accepted for c in beside) > 0


def test_a_finished_run_leaves_the_slot_as_new(pair, prompt):
    """Ten different prompts in a row: nothing of one sequence reaches the next."""
    _, engine = pair
    greedy, sampled = (replace(params, max_new_tokens=40) for params in (GREEDY, SAMPLED))
    first = engine.generate(prompt, greedy).tokens
    for text in PROMPTS[1:10]:
        engine.generate(text, sampled)
    assert engine.generate(prompt, greedy).tokens == first
    assert engine.runner.busy == 0
