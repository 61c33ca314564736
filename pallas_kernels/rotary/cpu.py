"""Cosines and sines on a CPU: every angle by itself, 16 at a time, what 16 does not divide one at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu

LANES = 16


def cos_sin(angles: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """`rotary.cos_sin` on a CPU."""
    size = angles.size
    whole = size - size % LANES

    def build(c: Any, x: Any, cos: Any, sin: Any) -> None:
        def turn(i: Any, lanes: int) -> None:
            cosine, sine = c.cos_sin(x.load(i, lanes=lanes))
            cos.store(cosine, i)
            sin.store(sine, i)

        c.loop(0, whole, [], lambda i: turn(i, LANES), step=LANES)
        c.loop(whole, size, [], lambda i: turn(i, 0))

    result = jax.ShapeDtypeStruct((size,), dtype)
    cos, sin = cpu.kernel("rotary", build, [jax.ShapeDtypeStruct((size,), jnp.float32)], [result, result])(angles.reshape(size))
    return cos.reshape(angles.shape), sin.reshape(angles.shape)
