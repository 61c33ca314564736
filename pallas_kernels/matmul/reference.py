"""The quantised projection in plain jnp, float32 throughout: what every kernel is checked against and CPUs run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.quantised import QuantisedWeight, dequantise


def quantised_linear(
    x: jax.Array,
    weight: QuantisedWeight,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    swiglu: bool = False,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """`matmul.quantised_linear` in plain jnp, float32 until the result is rounded to `out_dtype`."""
    h = x.astype(jnp.float32)
    if norm is not None:
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=1, keepdims=True) + eps) * (1 + norm.astype(jnp.float32))
    y = jnp.dot(h, dequantise(weight), precision=jax.lax.Precision.HIGHEST)
    if swiglu:
        gate, up = jnp.split(y, 2, axis=1)
        y = jax.nn.silu(gate) * up
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return y.astype(out_dtype)
