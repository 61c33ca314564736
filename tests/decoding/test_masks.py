"""Grammar masks in the draw, against a brute-force mask and against one token at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.decoding import choose, judge, masked
from ninfer_jax.decoding.sampling import SamplingState, sampling_struct

VOCAB, K = 40, 3


def state(slots: int, temperature: float, emitted: int) -> SamplingState:
    values = {
        "temperature": temperature,
        "top_p": 0.9,
        "repetition": 1.3,
        "stop_ids": -1,
        "emitted": emitted,
        "key": 7,
        "top_k": 12,
    }
    leaves = sampling_struct(slots, VOCAB)._asdict().items()
    return SamplingState(**{name: jnp.full(leaf.shape, values.get(name, 0), leaf.dtype) for name, leaf in leaves})


def packed(allowed: np.ndarray) -> np.ndarray:
    """uint32 words of rows of booleans, bit by bit."""
    words = np.zeros((*allowed.shape[:-1], -(-allowed.shape[-1] // 32)), np.uint32)
    for place in np.argwhere(allowed):
        words[(*place[:-1], place[-1] // 32)] |= np.uint32(1 << (place[-1] % 32))
    return words


@pytest.fixture(scope="module")
def draw():
    return jax.jit(lambda logits, mask, on, state, drafts: choose(masked(logits, mask, on), state, drafts, VOCAB).token)


def test_only_constrained_rows_lose_what_their_mask_lacks():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 2, VOCAB)).astype(np.float32)
    allowed = rng.random((3, 2, VOCAB)) < 0.3
    allowed[2, 1] = False  # nothing may follow: as it is, no NaN
    found = np.asarray(jax.jit(masked)(logits, packed(allowed), jnp.array([True, False, True])))
    expected = np.where(allowed, logits, -np.inf)
    expected[1], expected[2, 1] = logits[1], logits[2, 1]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.asarray(masked(logits, packed(allowed) * 0, jnp.zeros(3, bool))), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_under_masks_give_what_single_tokens_give(draw, temperature: float):
    # A model whose logits only the last token decides, and a grammar whose allowed tokens do too.
    rng = np.random.default_rng(1)
    model = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
    grammar = rng.random((VOCAB, VOCAB)) < 0.2
    grammar[:, 0] = True
    on = jnp.array([True])

    def rows(last: int, drafts: list[int]) -> tuple:
        behind = [last, *drafts]
        allowed, legal = np.ones((K + 1, VOCAB), bool), True
        for row, token in enumerate(behind):
            legal = legal and (row == 0 or bool(grammar[behind[row - 1], token]))
            if legal:
                allowed[row] = grammar[token]
        return model[behind][None], packed(allowed)[None]

    def answer(drafting: bool) -> list[int]:
        tokens = [5]
        while len(tokens) < 60:
            right = np.argmax(np.where(grammar[tokens[-1]], model[tokens[-1]], -9))
            drafts = [int(right), *rng.integers(0, VOCAB, K - 1).tolist()] if drafting else [VOCAB - 1] * K
            logits, mask = rows(tokens[-1], drafts)
            now = state(1, temperature, len(tokens) - 1)
            now = now._replace(counts=jnp.asarray(np.bincount(tokens[1:], minlength=VOCAB)[None], jnp.int32))
            drawn = draw(logits, mask, on, now, jnp.array([drafts], jnp.int32))
            verdict = judge(
                drawn, jnp.array([drafts], jnp.int32), jnp.arange(-1, K)[None], jnp.full((1, 1), -1), jnp.array([99]), on
            )
            # Without drafts only the first row counts.
            count = int(verdict.emitted[0]) if drafting else 1
            tokens += np.asarray(drawn)[0, :count].tolist()
        return tokens[:60]

    tokens = answer(True)
    assert all(grammar[a, b] for a, b in itertools.pairwise(tokens))
    assert tokens == answer(False)
