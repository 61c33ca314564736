"""Gated DeltaNet over a prefill chunk in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import causal_conv, chunked_delta_rule, decay_and_beta, split_qkv
from pallas_kernels.norms import gated_norm


def delta_prefill(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    slot: jax.Array,
    count: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`delta_prefill.delta_prefill` in plain jnp; output rows of padding are anything finite."""
    _, value_heads, key_dim, value_dim = recurrent.shape
    channels = conv.shape[-1]
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    z = projected[:, channels:].reshape(-1, value_heads, value_dim)
    before = taps.shape[2] - 1
    window = jnp.concatenate([conv[slot, :before], projected[:, :channels]])
    mixed = causal_conv(window, taps).astype(projected.dtype)
    q, k, v = split_qkv(mixed, key_heads, value_heads, key_dim, value_dim)
    # A token with g = beta = 0 is no token to the delta rule; that is how the padding of the last chunk is passed.
    valid = (jnp.arange(projected.shape[0]) < count)[:, None]
    g, beta = decay_and_beta(ab[:, :value_heads], ab[:, value_heads:], a_log, dt_bias)
    out, new = chunked_delta_rule(recurrent[slot], q, k, v, jnp.where(valid, g, 0.0), jnp.where(valid, beta, 0.0))
    kept = jax.lax.dynamic_slice_in_dim(window, count, before, axis=0)
    gated = gated_norm(out, z, norm, eps).reshape(projected.shape[0], -1)
    return gated, conv.at[slot, :before].set(kept), recurrent.at[slot].set(new)
