"""Inputs of the delta rule: causal depthwise convolution, the q/k/v split, L2 norms and the two gates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

L2_EPS = 1e-6  # inside the root, on the sum of squares (not the mean)


def causal_conv(window: jax.Array, weight: jax.Array) -> jax.Array:
    """SiLU of the causal depthwise convolution.

    window `[..., width - 1 + tokens, channels]`: the raw inputs, preceded by the last `width - 1` of before.
    weight `[channels, 1, width]`, the last tap multiplies the current token. Returns float32 `[..., tokens, channels]`.
    """
    width = weight.shape[-1]
    tokens = window.shape[-2] - (width - 1)
    taps = weight[:, 0, :].astype(jnp.float32)
    total = jnp.zeros((*window.shape[:-2], tokens, window.shape[-1]), jnp.float32)
    for tap in range(width):
        part = jax.lax.slice_in_dim(window, tap, tap + tokens, axis=window.ndim - 2)
        total = total + part.astype(jnp.float32) * taps[:, tap]
    return jax.nn.silu(total)


def l2_normalise(x: jax.Array) -> jax.Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def split_qkv(mixed: jax.Array, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Flat channels `[q | k | v]`, head-major inside each -> q and k `[..., key_heads, key_dim]`, L2-normed and q
    scaled by key_dim^-1/2, and v `[..., value_heads, value_dim]`; all float32."""
    keys = key_heads * key_dim
    lead = mixed.shape[:-1]
    q = l2_normalise(mixed[..., :keys].reshape(*lead, key_heads, key_dim)) * (key_dim**-0.5)
    k = l2_normalise(mixed[..., keys : 2 * keys].reshape(*lead, key_heads, key_dim))
    v = mixed[..., 2 * keys :].reshape(*lead, value_heads, value_dim).astype(jnp.float32)
    return q, k, v


def decay_and_beta(a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-decay g = -exp(A_log) * softplus(a + dt_bias) <= 0 and beta = sigmoid(b), float32 `[..., value_heads]`."""
    g = -jnp.exp(a_log.astype(jnp.float32)) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return g, jax.nn.sigmoid(b.astype(jnp.float32))
