"""Divergence of next-token distributions at decode width."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ninfer_jax.evaluate.divergence import compare, decode_logprobs, kl_divergence


def test_two_tokens_by_hand():
    p, q = np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([[0.5, 0.5], [0.9, 0.1]])
    first = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    second = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5)
    np.testing.assert_allclose(kl_divergence(np.log(p), np.log(q)), [first, second], rtol=1e-12)
    found = compare("int8", 3, np.log(p), np.log(q), [1, 0])
    assert (found.kv, found.depth, found.tokens, found.same_top) == ("int8", 3, 2, 0.5)
    np.testing.assert_allclose([found.kl, found.kl_max], [(first + second) / 2, max(first, second)])
    np.testing.assert_allclose([found.loss, found.reference_loss], [-np.log([0.5, 0.9]).mean(), -np.log([0.75, 0.5]).mean()])


def test_small_differences_keep_their_digits():
    """KL is about half the variance of d for small d: float32 log-probabilities alone would leave noise of 1e-7."""
    rng = np.random.default_rng(1)
    x = rng.normal(0, 2, 1000)
    p = np.exp(x) / np.exp(x).sum()
    y = x + rng.normal(0, 1e-5, 1000)
    q = np.exp(y) / np.exp(y).sum()
    d = np.log(q) - np.log(p)
    found = kl_divergence(np.log(p)[None], np.log(q)[None])[0]
    assert found == pytest.approx((p * d**2).sum() / 2, rel=1e-3, abs=0) and found < 1e-9


def test_log_probabilities_are_those_of_scoring(engine, ids):
    logits = engine.score(ids)[:, : engine.tokenizer.vocab_size].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    told = []
    rows = decode_logprobs(engine, ids, [0, 64], 10, lambda done, total: told.append((done, total)))
    for depth, found in zip((0, 64), rows, strict=True):
        assert found.shape == (10, engine.tokenizer.vocab_size)
        np.testing.assert_allclose(found, expected[depth : depth + 10], atol=5e-3)
    assert told[-1] == (20, 20) and len(told) == 20


def test_a_coarse_format_diverges_and_a_run_repeats(engine, coarse_engine, ids):
    exact, again, coarse = (decode_logprobs(e, ids, [64], 30)[0] for e in (engine, engine, coarse_engine))
    targets = ids[65:95]
    assert compare("f32", 64, exact, again, targets).kl == 0
    found = compare("rk4v4", 64, exact, coarse, targets)
    assert 1e-6 < found.kl < 1e-2 and found.same_top > 0.8
    assert found.loss == pytest.approx(found.reference_loss, abs=0.05)


def test_a_text_too_short(engine, ids):
    with pytest.raises(ValueError, match=rf"the text has {len(ids)} tokens, depth 400 and 20 more need 421"):
        decode_logprobs(engine, ids, [0, 400], 20)
