"""Projections on a CPU for the lab: the storage of checkpoints and of artifacts, one row and several."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lab.on_cpu import CpuCase, OnCpu
from pallas_kernels.matmul import cpu_norm, linear, quantised_linear
from pallas_kernels.matmul.cases import HIDDEN, Case
from pallas_kernels.norms import rms_norm


def _plain(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)


def _linear(rows: int, dtype: Any, k: int = 4096, n: int = 6144) -> CpuCase:
    name = f"cpu.{jnp.dtype(dtype).name}.{rows}row{'s' * (rows > 1)}"
    structs = (jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((n, k), dtype))
    return CpuCase("linear", name, functools.partial(linear, impl="cpu"), _plain, structs, multiply_adds=rows * k * n)


class OnACpu(OnCpu, Case):
    """A projection of the 27B over its codes, in float32 but for what is rounded to 16 bits a group."""

    @property
    def allowed_error(self) -> float:
        """The tolerance: that of the reference's bfloat16 result."""
        return 4e-3

    def run(self, x: Any, weight: Any, norm: Any, residual: Any) -> jax.Array:
        return quantised_linear(
            x, weight, norm=norm, residual=residual, swiglu=self.swiglu, out_dtype=jnp.dtype("float32"), impl="cpu"
        )

    @property
    def multiply_adds(self) -> int:
        """The work of its own rows: no tile is filled up."""
        return self.rows * self.k * self.n

    @property
    def ideal_bytes(self) -> int:
        """Codes, scales, units, inputs and outputs in float32, each once."""
        small = self.rows * self.k + self.k * self.norm + self.rows * self.out_columns * (1 + self.residual)
        return self.weight_bytes + 4 * small


def _quantised(name: str, rows: int, **format: Any) -> OnACpu:
    return OnACpu(f"cpu.{name}.{rows}row{'s' * (rows > 1)}", 6144, HIDDEN, rows=rows, residual=True, **format)


ON_CPU = (
    *(_linear(rows, jnp.float32) for rows in (1, 4, 16)),
    _linear(1, jnp.bfloat16),
    *(_quantised("q4", rows) for rows in (1, 4, 16)),
    _quantised("w8", 1, bits=8, group=128),
    _quantised("q4.prefill", 256),
    CpuCase(
        "rms_norm",
        "cpu.4rows",
        functools.partial(cpu_norm, eps=1e-6),
        functools.partial(rms_norm, eps=1e-6),
        (jax.ShapeDtypeStruct((4, HIDDEN), jnp.float32), jax.ShapeDtypeStruct((HIDDEN,), jnp.float32)),
    ),
)
