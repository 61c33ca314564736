"""The decode core of Gated DeltaNet in plain jnp: pending rows, convolution, gates, recurrence, gated norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import (
    Layout,
    Transitions,
    causal_conv,
    decay_and_beta,
    decode_delta_rule,
    fold_transitions,
    split_qkv,
)
from pallas_kernels.norms import gated_norm


def delta_decode(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    records: jax.Array,
    start: jax.Array,
    count: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    zero: jax.Array,
    *,
    rows: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`delta_decode.delta_decode` in plain jnp."""
    slots, value_heads, key_dim, value_dim = recurrent.shape
    kept = taps.shape[2] - 1
    channels = conv.shape[2]
    layout = Layout((channels - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim)
    most = records.shape[1] - rows
    accepted = jnp.clip(count, 0, most)
    at = start + accepted
    recurrent = fold_transitions(recurrent, layout.unpack(ring_read(records, start, most)), accepted, zero)
    out, fresh = decode_rows(
        projected, ab, ring_read(conv, at, kept), recurrent, taps, a_log, dt_bias, norm, zero, rows=rows, eps=eps
    )
    raw = projected[:, :channels].reshape(slots, rows, channels)
    takes_part = count >= 0
    out = jnp.where(jnp.repeat(takes_part, rows)[:, None], out, 0)
    return (out, ring_write(conv, at + kept, raw, takes_part), recurrent, ring_write(records, at, layout.pack(fresh), takes_part))


def decode_rows(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    zero: jax.Array,
    *,
    rows: int,
    eps: float,
) -> tuple[jax.Array, Transitions]:
    """`delta_decode` without its memory: `rows` rows of every slot after the states as they are, which are only read.

    conv `[slots, width - 1, channels]`: the raw inputs before, oldest first; the other arguments as there. Returns its `out`
    and the records `[slots, rows, ...]` that `fold_transitions` takes.
    """
    slots, value_heads, key_dim, value_dim = recurrent.shape
    channels = conv.shape[-1]
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    raw, z = projected[:, :channels], projected[:, channels:].reshape(-1, value_heads, value_dim)
    g, beta = decay_and_beta(ab[:, :value_heads], ab[:, value_heads:], a_log, dt_bias)
    raw, g, beta = (x.reshape(slots, rows, *x.shape[1:]) for x in (raw, g, beta))
    mixed = causal_conv(jnp.concatenate([conv, raw], axis=1), taps).astype(projected.dtype)
    q, k, v = split_qkv(mixed, key_heads, value_heads, key_dim, value_dim)
    transitions = Transitions(k, v, jnp.exp(g), beta)
    out = decode_delta_rule(recurrent, q, transitions, zero).reshape(-1, value_heads, value_dim)
    return gated_norm(out, z, norm, eps).reshape(slots * rows, -1), transitions


def ring_read(ring: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """`rows` rows of every slot of `[slots, ring, columns]`, from start (int32 `[slots]`) on."""
    at = (start[:, None] + jnp.arange(rows)) % ring.shape[1]
    return jnp.take_along_axis(ring, at[..., None], axis=1)


def ring_write(ring: jax.Array, start: jax.Array, values: jax.Array, where: jax.Array) -> jax.Array:
    """`ring` with values `[slots, rows, columns]` from row `start` on, in the slots where bool `[slots]`."""
    at = (start[:, None] + jnp.arange(values.shape[1])) % ring.shape[1]
    slot = jnp.where(where, jnp.arange(len(start)), len(start))  # out of bounds: not written
    return ring.at[slot[:, None], at].set(values.astype(ring.dtype), mode="drop")
