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


def shift_window(conv: jax.Array, raw: jax.Array, accepted: jax.Array) -> jax.Array:
    """The window `[slots, width - 1, channels]` after `accepted[slot]` rows of raw inputs `[slots, rows, channels]`."""
    window = jnp.concatenate([conv, raw], axis=1)
    columns = accepted[:, None] + jnp.arange(conv.shape[1])
    return jnp.take_along_axis(window, columns[..., None], axis=1)
