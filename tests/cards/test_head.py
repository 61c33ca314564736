"""The head's candidates: the same ids as a stable sort of all logits, ties, short vocabularies and crowded blocks included."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul
from pallas_kernels.matmul import head, kernel

K, N, VALID = 64, 700, 690


def draw(seed=0, rows=3, crowd=None):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(K, N))
    if crowd is not None:
        w[:, crowd] *= 30  # so that nearly all large logits sit in one block
    weight = matmul.quantise(jnp.asarray(w, jnp.float32), bits=8, group=32)
    return jnp.asarray(rng.normal(size=(rows, K)), jnp.bfloat16), weight


def sorted_logits(x, weight, k):
    """Ids and logits by a stable sort on the host of the whole logits."""
    logits = np.asarray(kernel.decode(x, weight, out_dtype=jnp.float32, interpret=True))[:, :VALID]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(logits, order, 1)


def test_argmax():
    x, weight = draw()
    ids, logits = head.argmax(x, weight, valid=VALID, interpret=True)
    want_ids, want = sorted_logits(x, weight, 1)
    np.testing.assert_array_equal(ids, want_ids[:, 0])
    np.testing.assert_array_equal(logits, want[:, 0])


@pytest.mark.parametrize("k,crowd", [(1, None), (20, None), (64, None), (20, slice(256, 300))])
def test_top_k(k, crowd):
    """The crowded case has 20 winners in one block of 128, of which 8 survive the first step."""
    x, weight = draw(crowd=crowd)
    logits, ids = head.top_k(x, weight, k, valid=VALID, interpret=True)
    want_ids, want = sorted_logits(x, weight, k)
    if crowd is not None:
        assert ((want_ids // head.BLOCK == 2).sum(1) > head.KEEP).all()
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(logits, want)


def test_equal_logits_give_the_least_id():
    codes = np.zeros((K, N), np.int8)
    codes[:, [5, 130, 400]] = 1
    weight = matmul.pack(jnp.asarray(codes), jnp.ones((K // 32, N)), bits=8)
    x = jnp.ones((2, K), jnp.bfloat16)
    assert head.argmax(x, weight, valid=VALID, interpret=True)[0].tolist() == [5, 5]
    assert head.top_k(x, weight, 4, valid=VALID, interpret=True)[1].tolist() == [[5, 130, 400, 0]] * 2


def test_ids_beyond_the_vocabulary_never_win():
    codes = np.zeros((K, N), np.int8)
    codes[:, VALID:] = 100
    codes[:, 7] = 1
    weight = matmul.pack(jnp.asarray(codes), jnp.ones((K // 32, N)), bits=8)
    ids, logits = head.argmax(jnp.ones((1, K), jnp.bfloat16), weight, valid=VALID, interpret=True)
    assert (ids[0], logits[0]) == (7, K)


def test_k_out_of_range_is_named():
    x, weight = draw()
    with pytest.raises(ValueError, match="top_k: k 65 must be from 1 to 64"):
        head.top_k(x, weight, 65, valid=VALID)
