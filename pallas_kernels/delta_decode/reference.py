"""The decode core of Gated DeltaNet in plain jnp: convolution, gates, recurrence, gated norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import Transitions, causal_conv, decay_and_beta, decode_delta_rule, split_qkv
from pallas_kernels.norms import gated_norm


def delta_decode(
    projected: jax.Array, ab: jax.Array, conv: jax.Array, recurrent: jax.Array, taps: jax.Array, a_log: jax.Array,
    dt_bias: jax.Array, norm: jax.Array, zero: jax.Array, *, rows: int, eps: float,
) -> tuple[jax.Array, Transitions]:  # fmt: skip
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
