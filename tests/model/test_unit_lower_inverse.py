"""The inverse inside the chunked delta rule, and its derivative, against NumPy and JAX in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import chunked_delta_rule
from pallas_kernels.delta_rule.chunked import unit_lower_inverse

SIZE = 64


def lower(seed, shape=(), scale=1.0):
    return np.tril(np.random.default_rng(seed).standard_normal((*shape, SIZE, SIZE)) * scale, -1)


def keys_of_one_direction(spread, seed=0):
    """A = strict_lower(K K^T) of unit keys around one direction: the closer they are, the faster its powers grow."""
    random = np.random.default_rng(seed)
    k = random.standard_normal(32) + spread * random.standard_normal((SIZE, 32))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    return np.tril(k @ k.T, -1)


@pytest.mark.parametrize(
    "a",
    [
        np.tril(np.ones((SIZE, SIZE)), -1),
        keys_of_one_direction(0.0),
        keys_of_one_direction(0.1),
        keys_of_one_direction(3.0),
        lower(1, scale=0.1),
    ],
    ids=["ones", "equal keys", "similar keys", "spread keys", "small"],
)
def test_against_float64(a):
    wanted = np.linalg.inv(np.eye(SIZE) + a)
    ours = np.asarray(unit_lower_inverse(jnp.asarray(a, jnp.float32)), np.float64)
    assert np.abs(ours - wanted).max() < 1e-5 * max(1.0, np.abs(wanted).max())
    assert (np.triu(ours, 1) == 0).all() and (np.diag(ours) == 1).all()


def test_gradient():
    """Any function of the inverse: here a weighted sum of it and of its square."""
    with jax.enable_x64(True):
        a, weight = jnp.asarray(lower(2, (3,), 0.1)), jnp.asarray(lower(3, (3,)) + lower(4, (3,)).swapaxes(-1, -2))

        def through(inverse):
            return jax.grad(lambda a: jnp.sum(weight * inverse(a)) + jnp.sum(inverse(a) ** 2))(a)

        ours = through(unit_lower_inverse)
        theirs = through(lambda a: jnp.linalg.inv(jnp.eye(SIZE) + a))
        assert ours.dtype == jnp.float64
        assert np.abs(ours - theirs).max() < 1e-10 * np.abs(theirs).max()


def test_repeated_keys_through_the_chunked_rule():
    """One token over and over, beta = 1, no decay: after it the state returns v for k, exactly as after the first."""
    k = np.zeros((128, 1, 32), np.float32)
    k[:, :, 3] = 1.0
    v = np.broadcast_to(np.arange(16, dtype=np.float32), (128, 1, 16))
    out, state = chunked_delta_rule(jnp.zeros((1, 32, 16)), k, k, v, jnp.zeros((128, 1)), jnp.ones((128, 1)))
    assert np.abs(np.asarray(out) - v).max() < 1e-4
    wanted = np.zeros((32, 16))
    wanted[3] = np.arange(16)
    assert np.abs(np.asarray(state[0]) - wanted).max() < 1e-4
