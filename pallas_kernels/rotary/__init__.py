"""Cosines and sines of rotary angles, with the same bits for an angle wherever it stands and however many there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.rotary import cpu

__all__ = ["cos_sin"]


def cos_sin(angles: jax.Array, dtype: jnp.dtype, *, impl: str = "auto") -> tuple[jax.Array, jax.Array]:
    """cos and sin, each in `dtype` and of the shape of `angles`, float32 in radians.

    impl: `auto` is XLA; `cpu`, compiled by LLVM, is for angles up to 2^22 and at most 1.5e-7 from the exact values.
    """
    dtype = jnp.dtype(dtype)

    def xla(angles):
        return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)

    def compiled(angles):
        return cpu.cos_sin(angles, dtype)

    return launch.by_platform(angles, xla=xla, cpu=compiled, impl=impl)
