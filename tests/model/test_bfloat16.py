"""Weights and activations in bfloat16: close to the float32 reference, and close to transformers running in bfloat16."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

NAME = "ratio2-4layers"


@pytest.fixture(scope="module")
def engine(harness):
    return harness(NAME, dtype=jnp.bfloat16, kv="bf16", draft=2)


def test_prefill(engine, expected, ids):
    hidden = engine.sequence().prefill(ids, cut=100)
    assert hidden.dtype == jnp.bfloat16
    agrees(engine.logits(hidden), expected(NAME, len(ids)).logits)


def test_decode(engine, expected, ids):
    """Log-probabilities of every tenth token's successor, from the states that the tokens before it left."""
    theirs = expected(NAME, len(ids)).logits
    sequence = engine.sequence()
    sequence.prefill(ids[:100])
    same = []
    for at in range(100, 160):
        out = sequence.feed(ids[at])
        wanted = theirs[at] - np.logaddexp.reduce(theirs[at])
        assert np.abs(out.top_logprobs[0] - wanted[out.top_tokens[0]]).max() < 0.4
        same.append(out.tokens[0] == theirs[at].argmax())
    assert np.mean(same) > 0.9
    assert all(x.dtype == np.float32 for x in sequence.recurrent) and all(x.dtype == jnp.bfloat16 for x in sequence.conv)


def test_drafting(engine, ids):
    """Emitted tokens are the same with drafts and without: both choose from the target's logits."""
    drafted, fed = engine.sequence(), engine.sequence()
    for sequence in (drafted, fed):
        sequence.prefill(ids[:20])
    text = [drafted.begin().tokens[0]]
    while len(text) < 15:
        out = drafted.round()
        text += out.tokens[: out.emitted].tolist()
    for token, after in itertools.pairwise(text):
        assert fed.feed(token).tokens[0] == after


def agrees(ours, theirs):
    assert np.abs(ours - theirs).max() < 0.4
    assert np.mean(ours.argmax(-1) == theirs.argmax(-1)) > 0.9
