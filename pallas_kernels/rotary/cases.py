"""Rotary angles for the lab: a prefill call's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.lab.on_cpu import CpuCase
from pallas_kernels.rotary import cos_sin

_FLOAT32 = jnp.dtype("float32")
ON_CPU = (
    CpuCase(
        "cos_sin",
        "cpu.512rows",
        functools.partial(cos_sin, dtype=_FLOAT32, impl="cpu"),
        functools.partial(cos_sin, dtype=_FLOAT32, impl="xla"),
        (jax.ShapeDtypeStruct((512, 32), jnp.float32),),
    ),
)
