"""`linear(x, w)`: the projection of a few decode rows or of a prefill chunk, float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Up to this many rows a call is a decode step, where a row's bits must not depend on the rows beside it: greedy
# decoding with drafts has to equal greedy decoding without them even where two logits nearly tie.
DECODE_ROWS = 24


def linear(x: jax.Array, w: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x `[rows, in]` @ w `[out, in]` transposed -> `[rows, out]` in `out_dtype` (default: x's dtype).

    With at most `DECODE_ROWS` rows the result of each row is bit-identical for every row count; above that the
    fastest matrix product is used. Float32 inputs are multiplied in full float32, never TF32.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"linear: x {x.shape} and w {w.shape} must be [rows, in] and [out, in] with the same in")
    if x.shape[0] > DECODE_ROWS:
        y = _matrix(x, w)
    else:
        y = jax.lax.platform_dependent(x, w, cpu=_row_by_row, default=_padded_tile)
    return y.astype(out_dtype or x.dtype)


def _matrix(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _row_by_row(x: jax.Array, w: jax.Array) -> jax.Array:
    # One matrix-vector product a row: XLA's CPU matrix product sums in an order that depends on the row count, and
    # at one row it is also the fastest form.
    rows = [jnp.dot(w, x[r], preferred_element_type=jnp.float32) for r in range(x.shape[0])]
    return jnp.stack(rows)


def _padded_tile(x: jax.Array, w: jax.Array) -> jax.Array:
    # A GPU multiplies whole tiles anyway; the same tile shape for every row count means the same kernel and order.
    tile = 16 if x.shape[0] <= 16 else 32
    return _matrix(jnp.pad(x, ((0, tile - x.shape[0]), (0, 0))), w)[: x.shape[0]]
