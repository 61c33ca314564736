"""Settling in plain jnp: waiting transitions replayed, the convolution window moved to the front of its ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_decode.reference import ring_read, ring_write
from pallas_kernels.delta_rule import Layout, fold_transitions


def delta_fold(
    recurrent: jax.Array, conv: jax.Array, records: jax.Array, start: jax.Array, count: jax.Array, zero: jax.Array, *, width: int
) -> tuple[jax.Array, jax.Array]:
    """`delta_fold.delta_fold` in plain jnp."""
    _, value_heads, key_dim, value_dim = recurrent.shape
    layout = Layout((conv.shape[2] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim)
    waiting = layout.unpack(ring_read(records, start, records.shape[1]))
    window = ring_read(conv, start + jnp.maximum(count, 0), width - 1)
    return fold_transitions(recurrent, waiting, count, zero), ring_write(conv, jnp.zeros_like(start), window, count >= 0)
