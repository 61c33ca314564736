"""A draw's sums and rotary angles on a CPU: against float64, and the same bits whatever stands beside a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.draw import draw_sorted, log_total
from pallas_kernels.rotary import cos_sin

N = 1087  # 16 does not divide it
SETTINGS = (  # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (20, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.03),
    (40, 0.5, 0.01),
    (1, 1.0, 0.0),
    (5000, 0.0, 1.0),
)
ROWS = 64


def falling(n: int = N) -> np.ndarray:
    """Scaled logits `[settings, rows, n]`, some rows with only a few that are possible."""
    values = -np.sort(np.random.default_rng(0).exponential(2.0, (len(SETTINGS), ROWS, n)).astype(np.float32), axis=-1)
    values -= values[..., :1]
    values[:, ::8, 3:] = -np.inf
    return values


def settings() -> list[np.ndarray]:
    return [np.array(x, d) for x, d in zip(zip(*SETTINGS, strict=True), (np.int32, np.float32, np.float32), strict=True)]


def numbers() -> np.ndarray:
    uniform = np.random.default_rng(1).random((len(SETTINGS), ROWS), np.float32)
    uniform[:, :2] = 0.0
    uniform[:, 2:4] = 1 - 2.0**-24
    return uniform


def test_a_draw_is_the_inverse_of_the_truncated_distribution() -> None:
    values, uniform = falling(), numbers()
    got = np.asarray(draw_sorted(values, *settings(), uniform, impl="cpu"))
    for setting, (top_k, top_p, min_p) in enumerate(SETTINGS):
        count = top_k or N
        p = np.exp(values[setting].astype(np.float64))
        p[:, count:] = 0
        p /= p.sum(axis=1, keepdims=True)
        keep = (np.cumsum(p, axis=1) - p < top_p) & (p >= min_p * p[:, :1]) & (p > 0)
        keep[:, 0] = True
        reach = np.cumsum(np.where(keep, p, 0), axis=1)
        rank = got[setting]
        at = np.arange(ROWS)
        # float32 sums of N terms: what is off by so much may fall on either side.
        slack = N * 2.0**-24
        before, after = reach[at, rank] - p[at, rank], reach[at, rank]
        target = uniform[setting] * reach[:, -1]
        assert (before <= target + slack).all() and (target <= after + slack).all()
        assert (p[at, rank] > 0).all() and (rank < keep.sum(axis=1) + (top_p < 1)).all()
    assert (got[:, :2] == 0).all() and len(set(got[0].tolist())) > 20


@pytest.mark.bits
def test_a_row_is_drawn_alike_alone_and_beside_others() -> None:
    values, uniform, (top_k, top_p, min_p) = falling(), numbers(), settings()
    together = np.asarray(draw_sorted(values, top_k, top_p, min_p, uniform, impl="cpu"))
    totals = np.asarray(log_total(values, impl="cpu"))
    for slot in range(len(SETTINGS)):
        own = slice(slot, slot + 1)
        one = draw_sorted(values[own, 5:6], top_k[own], top_p[own], min_p[own], uniform[own, 5:6], impl="cpu")
        assert int(one[0, 0]) == together[slot, 5]
        np.testing.assert_array_equal(log_total(values[slot, 5], impl="cpu"), totals[slot, 5])


def test_the_total_is_that_of_float64() -> None:
    x = (np.random.default_rng(2).normal(0, 5, (6, N)) + np.array([0, 300, -300, 0, 0, 0])[:, None]).astype(np.float32)
    x[3:, 1000:] = -np.inf
    x[5, 1:] = -np.inf
    exact = np.logaddexp.reduce(x.astype(np.float64), axis=1)
    np.testing.assert_allclose(log_total(x, impl="cpu"), exact, rtol=3e-7, atol=3e-7)


def test_draws_refuse_shapes_that_do_not_fit() -> None:
    values, uniform, (top_k, top_p, min_p) = falling(32), numbers(), settings()
    with pytest.raises(ValueError, match=r"draw_sorted: top_p \(6,\) must be \(7,\)"):
        draw_sorted(values, top_k, top_p[1:], min_p, uniform)


ANGLES = np.concatenate([np.arange(0, 262_144, 7), np.random.default_rng(3).uniform(-300_000, 300_000, 20_003)]).astype(np.float32)


def test_cosines_and_sines_are_those_of_float64() -> None:
    cos, sin = jax.jit(lambda x: cos_sin(x, jnp.float32, impl="cpu"))(ANGLES)
    exact = ANGLES.astype(np.float64)
    assert np.abs(cos - np.cos(exact)).max() < 1.5e-7 and np.abs(sin - np.sin(exact)).max() < 1.5e-7
    rounded, _ = cos_sin(ANGLES[:99].reshape(9, 11), jnp.bfloat16, impl="cpu")
    np.testing.assert_array_equal(rounded, cos[:99].reshape(9, 11).astype(jnp.bfloat16))


@pytest.mark.bits
def test_an_angle_has_its_own_bits() -> None:
    cos, sin = cos_sin(ANGLES, jnp.float32, impl="cpu")
    for start, size in ((0, 1), (16, 3), (5, 17), (100, 40)):
        part = slice(start, start + size)
        for some, every in zip(cos_sin(ANGLES[part], jnp.float32, impl="cpu"), (cos, sin), strict=True):
            np.testing.assert_array_equal(some, every[part])
