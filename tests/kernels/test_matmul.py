"""`linear` against float64, on both sides of the row count that separates a decode step from a prefill chunk."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.matmul import DECODE_ROWS, _padded_tile, linear

run = jax.jit(linear, static_argnames="out_dtype")
ROWS = [1, 2, 6, DECODE_ROWS, DECODE_ROWS + 1, 64]


def operands(rows: int, n_in: int = 96, n_out: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x and w float32, their float64 product, and how much it may be off: the sum of magnitudes."""
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, n_in)).astype(np.float32), rng.normal(size=(n_out, n_in)).astype(np.float32)
    return x, w, np.float64(x) @ np.float64(w).T, np.abs(np.float64(x)) @ np.abs(np.float64(w)).T


@pytest.mark.parametrize("rows", ROWS)
def test_float32(rows: int) -> None:
    x, w, exact, magnitude = operands(rows)
    for function in (run, _padded_tile):  # the second is what a GPU runs at few rows
        y = np.asarray(function(jnp.asarray(x), jnp.asarray(w)))
        assert y.dtype == np.float32 and y.shape == exact.shape
        assert (np.abs(y - exact) <= 1e-6 * magnitude).all()


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_weights_accumulate_in_float32(rows: int) -> None:
    x, w, _, _ = operands(rows)
    x, w = x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
    exact = np.float64(x) @ np.float64(w).T
    magnitude = np.abs(np.float64(x)) @ np.abs(np.float64(w)).T
    y = run(jnp.asarray(x), jnp.asarray(w), out_dtype=jnp.float32)
    assert y.dtype == jnp.float32
    assert (np.abs(np.asarray(y) - exact) <= 1e-6 * magnitude).all()
    rounded = run(jnp.asarray(x), jnp.asarray(w))
    assert rounded.dtype == jnp.bfloat16
    # One rounding to 8 bits at the end and nothing before it.
    assert (np.abs(np.float64(np.asarray(rounded)) - exact) <= 2**-8 * np.abs(exact) + 1e-6 * magnitude).all()


@pytest.mark.parametrize("x, w", [((4, 8), (3, 9)), ((8,), (3, 8)), ((2, 4, 8), (3, 8)), ((4, 8), (8,)), ((4, 8), (8, 3))])
def test_shapes_that_do_not_fit(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="linear: x .* and w .* must be") as error:
        linear(jnp.zeros(x), jnp.zeros(w))
    assert str(x) in str(error.value) and str(w) in str(error.value) and "\n" not in str(error.value)
