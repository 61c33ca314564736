"""Arithmetic with the same bits wherever it stands.

A verified row and its replay must change the recurrent state by the very same bits, or drafting would drift away from
plain decoding. XLA's CPU compiler contracts a * b + c to one rounding, or not, depending on what it fused around it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def opaque_zero(lengths: jax.Array) -> jax.Array:
    """An int32 scalar that is zero, which no compiler can know: `lengths` (any int32 array) are never negative."""
    return jnp.minimum(jnp.min(lengths), 0)


def rounded(product: jax.Array, zero: jax.Array) -> jax.Array:
    """`product` itself, rounded to float32 before anything is added to it.

    An exclusive or with an opaque zero leaves the bits as they are and ends the compiler's freedom to contract. Barriers
    do not (they are dropped before fusion), and `reduce_precision` to float32 is removed as a no-op.
    """
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(product, jnp.int32) ^ zero, jnp.float32)
