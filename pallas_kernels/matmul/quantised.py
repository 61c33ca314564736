"""Weights of 4 or 8 bits with a one-byte scale per group, stored in the order in which tensor cores eat them.

A weight `W[K, N]` is cut along K into groups of G; value = unit x scale x code. Codes are two's complement: w4 in [-8, 7],
w8 in [-127, 127]. Scales are integers in [-127, 127] of their group and column, the unit is a float32 of the whole column:
a kernel applies it once, to the finished sum.

Storage, int16 words. A tile is 64 bits of every column's next groups: 4 groups of w4, 2 of w8. Word k of a tile holds,
from its low nibble up, for w4 the codes k of groups 0, 1, 2, 3, for w8 the low and high nibble of code k of group 0,
then of group 1. So nibble j of all words of a tile is a [G, N] matrix of small integers: a *plane*.
Words go by 32 x 8 blocks (32 of k, 8 columns) in the order of the B operand of two m16n8k16 products: one 128-bit load
gives a thread its fragments of all four planes, and nothing has to move between threads afterwards.
The scales of a tile and a column share a word: byte j is 128 + that of the tile's group j.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BITS = (4, 8)
GROUPS = (32, 64, 128)
COLUMNS = 128  # N is padded to a multiple of this, the widest block of any kernel: blocks never overhang
_CODE_MAX = {4: 7, 8: 127}
_CODE_MIN = {4: -8, 8: -127}
SCALE_MAX = 127  # in units of the column


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["words", "scales", "unit"], meta_fields=["bits", "group", "shape"]
)
@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """`W[K, N]` in 4 or 8 bits.

    words: int16 `[tiles * G / 32, padded N * 32]`.
    scales: `[tiles, padded N]`, int32 for w4, int16 for w8; scale 0 in the padding, so that padded groups are exact zeros.
    unit: float32 `[padded N]`, of a column's scales; 0 in the padding.
    shape: (K, N) without padding.
    """

    words: jax.Array
    scales: jax.Array
    unit: jax.Array
    bits: int
    group: int
    shape: tuple[int, int]

    @property
    def tile(self) -> int:
        """Rows of K in a tile."""
        return self.group * (16 // self.bits)

    @property
    def tiles(self) -> int:
        """Tiles along K."""
        return -(-self.shape[0] // self.tile)

    @property
    def padded_columns(self) -> int:
        """Columns with the padding, a multiple of `COLUMNS`."""
        return -(-self.shape[1] // COLUMNS) * COLUMNS

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and units, padding included."""
        return sum(a.size * a.dtype.itemsize for a in (self.words, self.scales, self.unit))


def structure(k: int, n: int, bits: int = 4, group: int = 64) -> QuantisedWeight:
    """A `QuantisedWeight` of shape structs, for compiling without weights."""
    check_format(bits, group)
    nothing: Any = None
    w = QuantisedWeight(nothing, nothing, nothing, bits, group, (k, n))
    return dataclasses.replace(
        w,
        words=jax.ShapeDtypeStruct((w.tiles * group // 32, w.padded_columns * 32), jnp.int16),
        scales=jax.ShapeDtypeStruct((w.tiles, w.padded_columns), jnp.int32 if bits == 4 else jnp.int16),
        unit=jax.ShapeDtypeStruct((w.padded_columns,), jnp.float32),
    )


def check_format(bits: int, group: int) -> None:
    """ValueError for bits or a group that there is no storage for."""
    if bits not in BITS:
        raise ValueError(f"bits: {bits} is not one of {BITS}")
    if group not in GROUPS:
        raise ValueError(f"group: {group} is not one of {GROUPS}")


def quantise(weight: jax.Array, *, bits: int = 4, group: int = 64) -> QuantisedWeight:
    """Quantise `W[K, N]` (any float type); each group's scale is the candidate with the least squared error.

    Candidates: 8 scales that put the group's largest magnitude at 0.7 to 1.0 of the code range; for w4 8 more that
    put it on -8, the code without a positive twin (the scale takes the sign for it). All are judged as they are stored,
    rounded to whole units, of which the largest candidate of a column has 127. ValueError for other bits or groups, or
    anything but a float matrix.
    """
    check_format(bits, group)
    if weight.ndim != 2 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(f"weight: {weight.dtype} {weight.shape} must be a float matrix [K, N]")
    codes, scales, unit = _quantise(weight, bits, group)
    w = structure(codes.shape[0], codes.shape[1], bits, group)
    return QuantisedWeight(*_pack(codes, scales, unit, w), bits=bits, group=group, shape=(weight.shape[0], weight.shape[1]))


@functools.partial(jax.jit, static_argnames=("bits", "group"))
def _quantise(weight: jax.Array, bits: int, group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes int8 `[padded K, N]`, scales int8 `[K / G, N]`, unit float32 `[N]`."""
    k, n = weight.shape
    groups = -(-k // group)
    w = jnp.pad(weight.astype(jnp.float32), ((0, groups * group - k), (0, 0))).reshape(groups, group, n)
    peak = jnp.max(jnp.abs(w), axis=1)
    # The element of largest magnitude with its sign: w4 puts it on code -8, which has no positive twin.
    extreme = jnp.where(jnp.max(w, axis=1) == peak, peak, -peak)
    top = _CODE_MAX[bits]
    steps = jnp.linspace(0.7, 1.0, 8)
    candidates = [peak * c / top for c in steps]
    candidates += [extreme * c / _CODE_MIN[bits] for c in steps] if bits == 4 else []
    unit = jnp.max(peak, axis=0) / (top * SCALE_MAX)

    def try_scale(best, candidate):
        # At least one unit: it loses nothing against 0, which would make the group vanish.
        scale = jnp.sign(candidate) * jnp.maximum(jnp.round(jnp.abs(candidate) * _inverse(unit)), 1)
        error = jnp.sum(jnp.square(w - _encode(w, scale * unit, bits) * (scale * unit)[:, None]), axis=1)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])), None

    start = (jnp.full((groups, n), jnp.inf), jnp.zeros((groups, n)))
    (_, scale), _ = jax.lax.scan(try_scale, start, jnp.stack(candidates))
    codes = _encode(w, scale * unit, bits)
    return codes.astype(jnp.int8).reshape(groups * group, n), scale.astype(jnp.int8), unit


def _encode(w: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Codes of w `[groups, group, N]` under scales `[groups, N]`, as floats."""
    return jnp.clip(jnp.round(w * _inverse(scale)[:, None]), _CODE_MIN[bits], _CODE_MAX[bits])


def _inverse(x: jax.Array) -> jax.Array:
    """1 / x, 0 of 0."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))


def pack(codes: jax.Array, scales: jax.Array, *, bits: int, shape: tuple[int, int] | None = None) -> QuantisedWeight:
    """Codes int8 `[K, N]` and float scales `[K / G, N]` as a `QuantisedWeight`; K a multiple of the group.

    A column's scales are rounded to whole units, of which the largest in magnitude has 127. shape: the (K, N) to report
    where `codes` carry padding.
    """
    (k, n), groups = codes.shape, scales.shape[0]
    if codes.dtype != jnp.int8 or groups == 0 or k % groups or scales.shape[1:] != (n,):
        raise ValueError(f"pack: codes {codes.dtype} {codes.shape} and scales {scales.shape} do not fit together")
    group = k // groups
    check_format(bits, group)
    arrays = _pack(codes, *_round_scales(scales), structure(k, n, bits, group))
    return QuantisedWeight(*arrays, bits=bits, group=group, shape=shape or (k, n))


@jax.jit
def _round_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float scales `[groups, N]` as int8 and their unit `[N]`."""
    scales = scales.astype(jnp.float32)
    unit = jnp.max(jnp.abs(scales), axis=0) / SCALE_MAX
    return jnp.round(scales * _inverse(unit)).astype(jnp.int8), unit


@functools.partial(jax.jit, static_argnums=3)
def _pack(codes: jax.Array, scales: jax.Array, unit: jax.Array, w: QuantisedWeight) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arrays of the described `w`: codes in storage order, everything padded."""
    # Whole tiles of K and whole blocks of columns, codes as unsigned numbers of `bits` bits.
    k, n = codes.shape
    pad_k, pad_n = w.tiles * w.tile - k, w.padded_columns - n
    codes = jnp.pad(codes, ((0, pad_k), (0, pad_n))).astype(jnp.int32) & (2**w.bits - 1)
    # A 16-bit word takes the same row of each of a tile's groups: `planes` codes, `group` rows apart.
    planes = 16 // w.bits
    parts = codes.reshape(w.tiles, planes, w.group, -1)
    shifts = w.bits * jnp.arange(planes)[None, :, None, None]
    words = jnp.sum(parts << shifts, axis=1).astype(jnp.uint16)
    # Into the order of a tensor core's right operand, so that 128 consecutive bits are one thread's:
    # k = (32-block, half, b3, lane, b0), n = (8-block, column) -> block by block, then column, lane, half, b3, b0.
    words = words.reshape(w.tiles * w.group // 32, 2, 2, 4, 2, -1, 8).transpose(0, 5, 6, 3, 1, 2, 4)
    words = jax.lax.bitcast_convert_type(words.reshape(words.shape[0], -1), jnp.int16)
    # The scales of a tile's groups side by side in one word a column, their sign bit flipped: `unpack.scale` undoes it.
    scales = jnp.pad(scales, ((0, w.tiles * planes - scales.shape[0]), (0, pad_n))).reshape(w.tiles, planes, -1)
    scales = jax.lax.bitcast_convert_type(jnp.swapaxes(scales ^ -128, 1, 2), w.scales.dtype)
    return words, scales, jnp.pad(unit, (0, pad_n))


def unpack(weight: QuantisedWeight) -> tuple[jax.Array, jax.Array]:
    """The codes int8 `[padded K, padded N]` and scales x unit, float32 `[padded K / G, padded N]`, of a weight."""
    w = jax.lax.bitcast_convert_type(weight.words, jnp.uint16).astype(jnp.int32)
    w = w.reshape(w.shape[0], -1, 8, 4, 2, 2, 2).transpose(0, 4, 5, 3, 6, 1, 2)
    w = w.reshape(weight.tiles, 1, weight.group, -1)
    planes = 16 // weight.bits
    half = 2 ** (weight.bits - 1)
    codes = (w >> (weight.bits * jnp.arange(planes)[None, :, None, None])) & (2 * half - 1)
    codes = (codes ^ half) - half
    scales = jnp.swapaxes(jax.lax.bitcast_convert_type(weight.scales, jnp.int8) ^ -128, 1, 2).reshape(-1, w.shape[-1])
    return codes.astype(jnp.int8).reshape(-1, w.shape[-1]), scales.astype(jnp.float32) * weight.unit


def dequantise(weight: QuantisedWeight) -> jax.Array:
    """The float32 matrix `[K, N]` that `weight` stands for."""
    codes, scales = unpack(weight)
    full = codes.astype(jnp.float32) * jnp.repeat(scales, weight.group, axis=0)
    return full[: weight.shape[0], : weight.shape[1]]


def concatenate(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Projections of one input side by side, `[K, N1 + N2 + ...]`: one launch for all.

    All but the last need N a multiple of `COLUMNS`; bits, group and K must agree.
    """
    first = weights[0]
    for w in weights:
        if (w.bits, w.group, w.shape[0]) != (first.bits, first.group, first.shape[0]):
            raise ValueError(
                f"concatenate: w{w.bits} group {w.group} K {w.shape[0]} beside w{first.bits} group {first.group} K {first.shape[0]}"
            )
    for w in weights[:-1]:
        if w.shape[1] != w.padded_columns:
            raise ValueError(f"concatenate: {w.shape[1]} columns before the last weight, must be a multiple of {COLUMNS}")
    return QuantisedWeight(
        jnp.concatenate([w.words for w in weights], axis=1),
        jnp.concatenate([w.scales for w in weights], axis=1),
        jnp.concatenate([w.unit for w in weights]),
        first.bits,
        first.group,
        (first.shape[0], sum(w.shape[1] for w in weights)),
    )


def ideal_bytes(k: int, n: int, bits: int, group: int) -> int:
    """Bytes of the codes, scales and units alone, nothing padded."""
    return int(np.ceil(k * n * bits / 8)) + -(-k // group) * n + 4 * n
