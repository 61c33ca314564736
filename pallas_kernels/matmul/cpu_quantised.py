"""Projections of a few rows on a CPU over weights of 4 or 8 bits, read as `quantised` stores them: an artifact's files can be
mapped as they are.

Activations are rounded to int16 per row and group (`cpu_codes`), products are summed in integers: exact, in whatever order an
instruction likes, `vpmaddwd` under AVX2 as under AVX-512. 4 bits go by `cpu_turned`, 8 by `cpu_by_column`: the two have float
sums of other orders, so a format has one of them for every number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.matmul import cpu_by_column, cpu_turned
from pallas_kernels.matmul.cpu_codes import Shape, round_activations
from pallas_kernels.matmul.quantised import QuantisedWeight

ROWS = 32


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
    """`matmul.quantised_linear` on a CPU; its checks are relied on. x `[1..32, K]` bfloat16 or float32."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (weight.words, weight.scales, weight.unit)]
    described = dataclasses.replace(weight, words=structs[0], scales=structs[1], unit=structs[2])
    shape = Shape(x.shape[0], described, norm is not None, swiglu, residual is not None, eps)
    operands = [a for a in (x, weight.words, weight.scales, weight.unit, norm, residual) if a is not None]
    by_column = weight.bits == 8
    groups = (shape.rows, weight.tiles, shape.planes) if by_column else (weight.tiles, shape.planes, shape.rows)
    call = cpu.kernel(
        f"w{weight.bits}" + "_norm" * shape.normed + "_swiglu" * swiglu + "_add" * shape.added,
        functools.partial(cpu_by_column.columns if by_column else cpu_turned.columns, shape=shape),
        operands,
        [jax.ShapeDtypeStruct((shape.rows, shape.out), out_dtype)],
        parts=shape.parts,
        before=functools.partial(round_activations, shape=shape, rows_first=by_column),
        workspace=[jax.ShapeDtypeStruct((*groups, shape.blocks, 32), jnp.int16), jax.ShapeDtypeStruct(groups, jnp.float32)],
    )
    return call(*operands)[0]
