"""The model's two RMS norms (Zhang and Sennrich 2019), float32 inside."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Zero-centred, over the last axis: x / sqrt(mean(x^2) + eps) (1 + weight), float32 with one cast at the end to x's
    dtype. weight float32 `[size]`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * (1.0 + weight)).astype(x.dtype)


def gated_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The delta rule's output norm over the last axis of float32 x: plain weight `[size]`, then times SiLU of the gate,
    in the gate's dtype."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    # The cast in the middle is the reference's: in bfloat16 it decides the last bit.
    normed = (x * scale).astype(gate.dtype).astype(jnp.float32) * weight
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
