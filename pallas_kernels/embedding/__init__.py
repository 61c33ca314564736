"""A quantised embedding: rows of 4- or 8-bit codes, looked up and expanded a few at a time.

A lookup reads a few rows, so it is memory-bound by nothing and XLA's gather is the kernel, on every platform.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

_TOP = {4: 7, 8: 127}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["bits", "group"])
@dataclasses.dataclass(frozen=True)
class QuantisedRows:
    """A matrix `[rows, size]` whose rows are read one at a time.

    codes: int8 `[rows, size]` for 8 bits; uint8 `[rows, size / 2]` for 4, the even column in the low nibble, two's
    complement. scales: bf16 `[rows, size / group]`; value = scale x code.
    """

    codes: jax.Array
    scales: jax.Array
    bits: int
    group: int


def structure(rows: int, size: int, *, bits: int, group: int) -> QuantisedRows:
    """`QuantisedRows` of shape structs. ValueError for a size that is no multiple of the group, or other bits than 4 and 8."""
    if bits not in _TOP:
        raise ValueError(f"bits: {bits} is not one of {tuple(_TOP)}")
    if size % group or group % 2:
        raise ValueError(f"group: {group} must be even and divide the row size {size}")
    struct: Any = jax.ShapeDtypeStruct
    codes = struct((rows, size * bits // 8), jnp.uint8 if bits == 4 else jnp.int8)
    return QuantisedRows(codes, struct((rows, size // group), jnp.bfloat16), bits, group)


@functools.partial(jax.jit, static_argnames=("bits", "group"))
def quantise_rows(matrix: jax.Array, *, bits: int, group: int) -> QuantisedRows:
    """Quantise `[rows, size]` (any float type): of eight scales that put a group's largest magnitude at 0.7 to 1.0 of the
    code range, the one with the least squared error."""
    rows, size = matrix.shape
    structure(rows, size, bits=bits, group=group)
    x = matrix.astype(jnp.float32).reshape(rows, size // group, group)
    peak = jnp.max(jnp.abs(x), axis=-1)
    top = _TOP[bits]

    def attempt(best: tuple[jax.Array, jax.Array], factor: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        scale = (peak * factor / top).astype(jnp.bfloat16).astype(jnp.float32)
        error = jnp.sum(jnp.square(x - _codes(x, scale, top) * scale[..., None]), axis=-1)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])), None

    start = (jnp.full(peak.shape, jnp.inf), jnp.zeros(peak.shape))
    (_, scale), _ = jax.lax.scan(attempt, start, jnp.linspace(0.7, 1.0, 8))
    codes = _codes(x, scale, top).astype(jnp.int8).reshape(rows, size)
    if bits == 4:
        low, high = codes[:, 0::2].astype(jnp.uint8) & 15, codes[:, 1::2].astype(jnp.uint8) & 15
        codes = low | (high << 4)
    return QuantisedRows(codes, scale.astype(jnp.bfloat16), bits, group)


def _codes(x: jax.Array, scale: jax.Array, top: int) -> jax.Array:
    inverse = jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))
    return jnp.clip(jnp.round(x * inverse[..., None]), -top, top)


def lookup(table: QuantisedRows, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows `ids` int32 `[n]` of the matrix that `table` stands for, `[n, size]` in `dtype`."""
    codes, scales = table.codes[ids], table.scales[ids].astype(jnp.float32)
    if table.bits == 4:
        nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
        codes = (nibbles.astype(jnp.int32) ^ 8) - 8
    values = codes.astype(jnp.float32).reshape(*scales.shape, -1) * scales[..., None]
    return values.reshape(codes.shape[0], -1).astype(dtype)
