"""Projections of many rows on a CPU over weights of 4 or 8 bits: some columns at a time are expanded to float32 and multiplied
by XLA.

A chunk of 512 rows multiplies each weight 512 times, so to unpack it costs next to nothing, and XLA's product of large
matrices is the fastest that there is here. What is expanded stays in the cache and is never more than `BLOCK_BYTES`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.matmul.quantised import QuantisedWeight
from pallas_kernels.norms import rms_norm

BLOCK_BYTES = 8 << 20  # of float32 weights expanded at a time
_UNIT = 64  # columns that a part of the kernel expands at a time: 4 KiB of consecutive words
_PARTS = 16


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
    """`matmul.quantised_linear` of any number of rows on a CPU, float32 until the result is rounded."""
    rows, n = x.shape[0], weight.shape[1] // 2 if swiglu else weight.shape[1]
    h = x.astype(jnp.float32)
    h = _in_storage_order(h if norm is None else rms_norm(h, norm.astype(jnp.float32), eps), weight)
    columns = block_columns(weight, n)

    def product(first: jax.Array) -> jax.Array:
        expanded = expand(weight, first, columns)
        return jax.lax.dot_general(h, expanded, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last block begins early enough to be whole: some columns are computed twice.
        first = jnp.minimum(i * columns, n - columns)
        y = product(first)
        if swiglu:
            y = jax.nn.silu(y) * product(first + n)
        if residual is not None:
            y = y + jax.lax.dynamic_slice(residual, (0, first), (rows, columns)).astype(jnp.float32)
        return jax.lax.dynamic_update_slice(out, y.astype(out_dtype), (0, first))

    out = jnp.zeros((rows, n), out_dtype)
    return block(jnp.int32(0), out) if columns == n else jax.lax.fori_loop(0, -(-n // columns), block, out)


def block_columns(weight: QuantisedWeight, n: int) -> int:
    """Columns of a block, of `n` in all."""
    fitting = BLOCK_BYTES // (4 * weight.tiles * weight.tile)
    return min(n, max(_UNIT, fitting // _UNIT * _UNIT))


def expand(weight: QuantisedWeight, first: jax.Array, columns: int) -> jax.Array:
    """Columns `first` (int32) .. `first` + `columns` of a weight as rows, float32 `[columns, padded K]` in storage order."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (weight.words, weight.scales, weight.unit)]
    operands = [*structs, jax.ShapeDtypeStruct((1,), jnp.int32)]
    described = dataclasses.replace(weight, words=structs[0], scales=structs[1], unit=structs[2])
    build = functools.partial(_expand, weight=described, columns=columns)
    units = -(-columns // _UNIT)
    out = jax.ShapeDtypeStruct((columns, weight.tiles * weight.tile), jnp.float32)
    call = cpu.kernel(f"w{weight.bits}_expand", build, operands, [out], parts=min(_PARTS, units))
    return call(weight.words, weight.scales, weight.unit, first.reshape(1))[0]


def _in_storage_order(x: jax.Array, weight: QuantisedWeight) -> jax.Array:
    """x `[rows, K]` padded with zeros to whole tiles, each 32 of k in the order of a column's 32 words (`quantised`)."""
    rows, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, weight.tiles * weight.tile - k)))
    return x.reshape(rows, -1, 2, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5).reshape(rows, -1)


def _expand(c: Any, *views: Any, weight: QuantisedWeight, columns: int) -> None:
    words, scales, unit, first, out = views
    planes, blocks, padded = 16 // weight.bits, weight.group // 32, weight.padded_columns
    words = c.view(words.pointer, (weight.tiles * blocks, padded, 32), jnp.int16)
    scales = c.view(scales.pointer, (weight.tiles, padded, planes), jnp.uint8)
    start = first.integer(0)

    def some(at: Any, count: int) -> None:
        def tile(t: Any) -> None:
            def column(i: Any) -> None:
                here = start + at + i
                read = [words.load(t * blocks + b, here, 0, lanes=32) for b in range(blocks)]
                scale = (scales.load(t, here, 0, lanes=planes).to(c.i32, signed=False) - 128).to(c.f32) * unit.load(here)
                for j in range(planes):
                    for b in range(blocks):
                        values = _codes(read[b], weight.bits, j).to(c.i32).to(c.f32) * c.spread(scale.lane(j), 32)
                        out.store(values, at + i, t * weight.tile + (j * weight.group + 32 * b))

            c.loop(0, count, [], column)

        c.loop(0, weight.tiles, [], tile)

    whole = columns // _UNIT
    if whole:
        begin, end = c.share(whole, min(_PARTS, -(-columns // _UNIT)))
        c.loop(begin, end, [], lambda i: some(i * _UNIT, _UNIT))
    if columns % _UNIT:
        with c.when(c.part.equals(0)):
            some(c.index(whole * _UNIT), columns % _UNIT)


def _codes(words: Any, bits: int, j: int) -> Any:
    """Plane j of 32 words as signed int16."""
    left = 16 - bits * (j + 1)
    return ((words << left) if left else words) >> (16 - bits)
