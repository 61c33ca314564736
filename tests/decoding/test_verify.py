"""Acceptance of drafts: `judge` against a loop written out, and the law that speculation must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ninfer_jax.decoding import choose, judge
from ninfer_jax.decoding.sampling import SamplingState


def chain(slots: int, draft: int) -> jax.Array:
    """Parents of rows of which each comes after the one before it."""
    return jnp.broadcast_to(jnp.arange(-1, draft), (slots, draft + 1))


def judged(tokens: list[int], drafts: list[int], stops: list[int], left: int, active: bool) -> tuple[int, int, int, bool]:
    """(emitted, drafted, accepted, finished) of one slot, one token at a time as plain decoding would."""
    if not active:
        return 0, 0, 0, False
    drafted = sum(d >= 0 for d in drafts)
    emitted = accepted = 0
    for row, token in enumerate(tokens):
        if left == 0:
            return emitted, drafted, accepted, True
        emitted, left = emitted + 1, left - 1
        agrees = row < len(drafts) and token == drafts[row]
        accepted += agrees
        if token in stops or left == 0:
            return emitted, drafted, accepted, True
        if not agrees:
            break  # the next row was computed from a token that was not emitted
    return emitted, drafted, accepted, False


@pytest.mark.parametrize("draft", [0, 1, 3, 5])
def test_judge_equals_the_loop(draft: int) -> None:
    rng = np.random.default_rng(draft)
    cases = 4000
    drafts = rng.integers(0, 4, (cases, draft))
    # Long accepted prefixes are as common as short ones: copy the drafts up to a random row.
    tokens = rng.integers(0, 4, (cases, draft + 1))
    copied = np.arange(draft) < rng.integers(0, draft + 1, (cases, 1))
    tokens[:, :draft] = np.where(copied, drafts, tokens[:, :draft])
    # Of some rounds nothing was drafted from some row on.
    drafts = np.where(np.arange(draft) < rng.integers(0, 2 * draft + 1, (cases, 1)), drafts, -1)
    stops = np.where(rng.random((cases, 3)) < 0.12, rng.integers(0, 4, (cases, 3)), -1)
    left = rng.integers(0, draft + 3, cases)
    active = rng.random(cases) < 0.8
    got = jax.jit(judge)(
        *(jnp.asarray(x, jnp.int32) for x in (tokens, drafts, chain(cases, draft), stops, left)), jnp.asarray(active)
    )
    expected = [
        judged(t.tolist(), d.tolist(), s.tolist(), n, a) for t, d, s, n, a in zip(tokens, drafts, stops, left, active, strict=True)
    ]
    got = np.stack([np.asarray(x, int) for x in got], axis=1)
    np.testing.assert_array_equal(got, np.array(expected, int))
    # The cases cover what they are for.
    assert set(got[:, 0]) == set(range(draft + 2))
    assert set(got[:, 1]) == set(got[:, 2]) == set(range(draft + 1))


def test_a_stop_id_inside_the_drafts_ends_there() -> None:
    verdict = judge(
        jnp.array([[5, 9, 6, 7]]), jnp.array([[5, 9, 6]]), chain(1, 3), jnp.array([[-1, 9]]), jnp.array([100]), jnp.array([True])
    )
    assert (int(verdict.emitted[0]), int(verdict.accepted[0]), bool(verdict.finished[0])) == (2, 2, True)


def sampling(slots: int, vocab: int, seed: int) -> SamplingState:
    """Plain sampling at temperature 1, every slot with its own key."""
    number, integer = jnp.zeros(slots, jnp.float32), jnp.zeros(slots, jnp.int32)
    return SamplingState(
        temperature=number + 1,
        top_k=integer,
        top_p=number + 1,
        min_p=number,
        presence=number,
        frequency=number,
        repetition=number + 1,
        key=jnp.stack([jnp.full(slots, seed, jnp.uint32), jnp.arange(slots, dtype=jnp.uint32)], axis=1),
        emitted=integer,
        top_logprobs=jnp.zeros(slots, bool),
        all_logits=jnp.ones(slots, bool),
        stop_ids=jnp.full((slots, 16), -1),
        bias=jnp.zeros((slots, vocab)),
        counts=jnp.zeros((slots, vocab), jnp.int32),
        in_prompt=jnp.zeros((slots, vocab), bool),
    )


def test_drafts_do_not_change_the_law() -> None:
    """Whatever is drafted, the first emitted token follows p, a draft d is accepted with probability p(d), and after a
    rejection the token follows p without d; the second token, where one comes, follows its own row's distribution."""
    vocab, rounds = 6, 20_000
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, vocab)).astype(np.float32) * 1.5
    p, p_next = (np.exp(x) / np.exp(x).sum() for x in logits.astype(np.float64))
    run = jax.jit(lambda state, drafts: _first_two(jnp.asarray(logits), state, drafts))
    for draft in range(vocab):
        tokens, accepted = (np.asarray(x) for x in run(sampling(rounds, vocab, draft), jnp.full((rounds, 1), draft)))
        first = np.bincount(tokens[:, 0], minlength=vocab)
        assert stats.chisquare(first, p * rounds).pvalue > 1e-4
        assert stats.binomtest(int(accepted.sum()), rounds, p[draft]).pvalue > 1e-4
        rest = np.delete(np.bincount(tokens[accepted == 0, 0], minlength=vocab), draft)
        assert stats.chisquare(rest, np.delete(p, draft) / (1 - p[draft]) * rest.sum()).pvalue > 1e-4
        second = np.bincount(tokens[accepted == 1, 1], minlength=vocab)
        assert stats.chisquare(second, p_next * second.sum()).pvalue > 1e-4


def _first_two(logits: jax.Array, state: SamplingState, drafts: jax.Array) -> tuple[jax.Array, jax.Array]:
    slots, vocab = drafts.shape[0], logits.shape[-1]
    tokens = choose(jnp.broadcast_to(logits, (slots, *logits.shape)), state, drafts, vocab).token
    verdict = judge(tokens, drafts, chain(slots, 1), state.stop_ids, jnp.full(slots, 10), jnp.full(slots, True))
    return tokens, verdict.accepted
