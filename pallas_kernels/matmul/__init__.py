"""`linear(x, w)`: the projection of a few decode rows or of a prefill chunk, float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Up to this many rows a call is a decode step and is padded to whole tensor-core tiles on a GPU: the same shape for
# every row count means the same kernel and the same order of sums, so drafting cannot flip a near tie.
DECODE_ROWS = 32
_TILE = 16


def linear(x: jax.Array, w: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x `[rows, in]` @ w `[out, in]` transposed -> `[rows, out]` in `out_dtype` (default: x's dtype).

    Float32 inputs are multiplied in full float32, never TF32.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"linear: x {x.shape} and w {w.shape} must be [rows, in] and [out, in] with the same in")
    if x.shape[0] > DECODE_ROWS:
        y = _matrix(x, w)
    else:
        y = jax.lax.platform_dependent(x, w, cpu=_few_rows, default=_padded_tile)
    return y.astype(out_dtype or x.dtype)


def _matrix(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _few_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    # At one row a matrix-vector product over [out, in] is what XLA's CPU backend does best.
    if x.shape[0] == 1:
        return jnp.dot(w, x[0], preferred_element_type=jnp.float32)[None]
    return _matrix(x, w)


def _padded_tile(x: jax.Array, w: jax.Array) -> jax.Array:
    rows = -(-x.shape[0] // _TILE) * _TILE
    return _matrix(jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))), w)[: x.shape[0]]
