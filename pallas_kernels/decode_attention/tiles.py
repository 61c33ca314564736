"""Pages of K and V as operands of tensor cores, straight from the stored bytes.

K comes as `[tokens, dims]` and V as `[dims, tokens]`, the left operand of products with a few columns (the query heads
of a few rows). Sums over dims may take them in any order, and so may the rows of V's product: both orders follow what
one wide load gives a thread, so that unpacking moves nothing between threads. `key_order` and `value_dims` say them.

Products of 4- and 8-bit codes are taken in fp16, whose 11 bits leave scores eight times the precision of bf16; 4-bit
values are exact in it. With the bits 0x6000 an fp16 number is 512 and its last mantissa bit is worth 1/2, so a nibble and
the lattice's half bit OR'd into it make 512 + nibble + half, and one packed multiply-add, x s - 520 s, gives
(nibble - 8 + half) s. 520 s has at most 10 significant bits and is below 2^15: nothing is rounded. Two words' nibbles are
handled at a time. Eight-bit V may exceed fp16 and is rounded to bf16. A bf16 K gets the bf16 query in two parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kv_codecs.formats import ROTATION_GROUP, SCALE_GROUP, WORD_DIMS, layout_of
from pallas_kernels.kv_codecs.scale_byte import decode_scales

HEAD_DIM = 256
WORDS = HEAD_DIM // WORD_DIMS
GROUP = ROTATION_GROUP  # dims under one int8 scale


@dataclasses.dataclass(frozen=True)
class Stored:
    """Codes and scales of one page's keys or values as they lie in memory, or in parts; no scales of float pages."""

    codes: list[jax.Array]
    scales: list[jax.Array] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one page: `tiles[i] [tokens, dims of order i]`, and float32 `scales[i] [tokens]` of the sums, or None."""

    tiles: list[jax.Array]
    scales: list[jax.Array] | None = None


def value_dtype(format: str) -> Any:
    """The type of `value_tiles`, and of the weights they are multiplied by."""
    if format == "f32":
        return jnp.float32
    return jnp.float16 if layout_of(format, "v").kind in ("int4", "e8") else jnp.bfloat16


def query_parts(format: str) -> int:
    """Columns of a query: bf16 keys get a bf16 query and, as a column of its own, what that leaves of it."""
    return 2 if format == "bf16" else 1


def query_tile(q: jax.Array, format: str) -> jax.Array:
    """float32 `q [dims, columns]` in the type of `key_tiles`, its `query_parts` side by side."""
    if format == "f32":
        return q
    if format != "bf16":
        return q.astype(jnp.float16)
    high = q.astype(jnp.bfloat16)
    rest = (q - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.stack([high, rest], axis=-1).reshape(q.shape[0], -1)


def key_order(format: str) -> list[jax.Array]:
    """The dims of `key_tiles`, each in the tile's order, int32."""
    kind = layout_of(format, "k").kind
    if kind in ("int4", "e8"):
        word = _in_operand_order(jnp.arange(WORDS, dtype=jnp.int32), 1)
        return [WORD_DIMS * word + i for i in range(WORD_DIMS)]
    if kind == "int8":
        within = _in_operand_order(jnp.arange(GROUP, dtype=jnp.int32), 4)
        return [GROUP * g + within for g in range(HEAD_DIM // GROUP)]
    return [jnp.arange(HEAD_DIM, dtype=jnp.int32)]


def value_heights(format: str) -> tuple[int, ...]:
    """Rows of each of `value_tiles`."""
    return (HEAD_DIM // 4,) * 4 if layout_of(format, "v").kind in ("int4", "e8") else (HEAD_DIM,)


def value_dims(format: str, row: jax.Array) -> jax.Array:
    """The dims of rows `row` of `value_tiles`, counted through all of them."""
    if layout_of(format, "v").kind == "float":
        return row
    # 8 neighbouring dims lie in one thread: eights of four warps, then the low bit, then the other two of the 8.
    low, warp, eight = row // 8 % 2, row // 16 % 4, row % 8
    return (warp * 8 + eight) * WORD_DIMS + row // 64 * 2 + low


def load_keys(codes: Any, scales: Any, index: tuple[Any, ...], format: str, tokens: int) -> Stored:
    """The stored keys at `index` = (page, head, first token). Stale tokens give scores of any value, NaN included."""
    kind = layout_of(format, "k").kind
    page, head, at = index
    rows = (page, head, pl.ds(at, tokens))
    if kind in ("int4", "e8"):
        return _load_words(codes, scales, rows)
    if kind == "int8":
        groups = range(HEAD_DIM // GROUP)
        return Stored(
            [launch.load(codes, (*rows, pl.ds(GROUP * g, GROUP))) for g in groups],
            [launch.load(scales, (*rows, g)) for g in groups],
        )
    return Stored([launch.load(codes, (*rows, pl.ds(0, HEAD_DIM)))])


def key_tiles(stored: Stored, format: str, use: int, interpret: bool) -> Keys:
    """The operands made of `load_keys`' result, for the `use`-th of several products with them."""
    kind = layout_of(format, "k").kind
    codes = [_own(c, use, interpret) for c in stored.codes]
    if kind in ("int4", "e8"):
        # A tile a nibble, 32 dims each. The scale goes in here: code x scale is exact in fp16.
        scale = scale_pairs(_own(stored.scales[0], use, interpret), interpret)
        return Keys([_from_operand_order(p, 1) for p in unpack_words(codes[0], scale, kind == "e8", interpret)])
    if kind == "int8":
        # A tile a scale, 64 dims each. Scales are left for the sums: code x scale would be rounded.
        return Keys([_from_operand_order(c, 4).astype(jnp.float16) for c in codes], [s.astype(jnp.float32) for s in stored.scales])
    return Keys([_float(codes[0])])


def load_values(codes: Any, scales: Any, index: tuple[Any, ...], inside: jax.Array, format: str, tokens: int) -> Stored:
    """The stored values at `index`, finite where bool `inside [tokens]` is false.

    Four-bit codes and scales are finite whatever their bits; of the others, what could be NaN or infinite is not read.
    """
    kind = layout_of(format, "v").kind
    page, head, at = index
    rows = (page, head, pl.ds(at, tokens))

    def masked(ref: Any, size: int) -> jax.Array:
        return launch.load(ref, (*rows, pl.ds(0, size)), jnp.broadcast_to(inside[:, None], (tokens, size)))

    if kind in ("int4", "e8"):
        return _load_words(codes, scales, rows)
    if kind == "int8":
        return Stored([launch.load(codes, (*rows, pl.ds(0, HEAD_DIM)))], [masked(scales, HEAD_DIM // GROUP)])
    return Stored([masked(codes, HEAD_DIM)])


def value_tiles(stored: Stored, format: str, use: int, interpret: bool) -> list[jax.Array]:
    """The operands `[dims, tokens]` made of `load_values`' result, as `key_tiles`."""
    kind = layout_of(format, "v").kind
    codes = _own(stored.codes[0], use, interpret)
    tokens = codes.shape[0]
    if kind in ("int4", "e8"):
        # Turned as words, before they are unpacked to four times the bytes. Two nibbles make a tile of 64 dims.
        scale = scale_pairs(_own(stored.scales[0], use, interpret).T, interpret)
        planes = unpack_words(codes.T, scale, kind == "e8", interpret)
        return [_interleave(planes[i : i + 2]) for i in range(0, WORD_DIMS, 2)]
    if kind == "int8":
        # The product sums over tokens, and each has scales of its own: they go in here, and the values are rounded to bf16.
        scale = _own(stored.scales[0], use, interpret).astype(jnp.float32)
        scale = jnp.broadcast_to(scale[:, :, None], (tokens, HEAD_DIM // GROUP, GROUP)).reshape(tokens, HEAD_DIM)
        values = (codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)
        # Rows in the order in which a thread's loads hold them, see `value_dims`.
        return [values.reshape(tokens, 4, 8, 4, 2).transpose(3, 1, 4, 2, 0).reshape(HEAD_DIM, tokens)]
    return [_float(codes).T]


def _load_words(codes: Any, scales: Any, rows: tuple[Any, ...]) -> Stored:
    """Words `[tokens, 32]`, and the scale byte of each as int16 of the same shape."""
    words = launch.load(codes, (*rows, pl.ds(0, WORDS)))
    groups = HEAD_DIM // SCALE_GROUP
    scale = launch.load(scales, (*rows, pl.ds(0, groups))).astype(jnp.int16)
    scale = jnp.broadcast_to(scale[:, :, None], (words.shape[0], groups, WORDS // groups))
    return Stored([words], [scale.reshape(words.shape)])


def _own(x: jax.Array, use: int, interpret: bool) -> jax.Array:
    """`x`, as a value of its own to the compiler.

    Of several products with one unpacked operand, jax 0.11 unpacks only for the first in the registers of tensor cores;
    the others' goes through shared memory. Moves that differ in a blank keep the uses apart, and `ptxas` merges them.
    """
    dtype = {"uint32": jnp.int32, "uint16": jnp.int16}.get(x.dtype.name, x.dtype)
    pack = max(1, 4 // x.dtype.itemsize)
    return launch.packed("mov.b32 $0, $1;" + " " * use, lambda v: v, x, dtype=dtype, interpret=interpret, pack=pack)


def unpack_words(words: jax.Array, scale: jax.Array, lattice: bool, interpret: bool) -> list[jax.Array]:
    """The 8 nibble planes of uint32 `words` times fp16 `scale` of the same shape, exact in fp16.

    lattice: the octet's half bit sits in bit 28, where the parity of the other seven low bits belongs (E8).
    """
    if not lattice:
        return [
            launch.packed(_plane_asm(i, False), _plane_twin(i), words, scale, dtype=jnp.float16, interpret=interpret)
            for i in range(WORD_DIMS)
        ]
    whole = launch.packed(_PARITY, _parity_twin, words, dtype=jnp.int32, interpret=interpret, pack=1)
    half = launch.packed(_HALF, _half_twin, words, dtype=jnp.int16, interpret=interpret)
    return [
        launch.packed(_plane_asm(i, True), _plane_twin(i), whole, half, scale, dtype=jnp.float16, interpret=interpret)
        for i in range(WORD_DIMS)
    ]


def scale_pairs(scale_bytes: jax.Array, interpret: bool) -> jax.Array:
    """fp16 scales of bytes (`kv_codecs.scale_byte`) in int16: exponent and mantissa moved into place."""

    def twin(b: jax.Array) -> jax.Array:
        return decode_scales(b).astype(jnp.float16)

    asm = (
        "{ .reg .b32 t, s; and.b32 t, $1, 0x007F007F; shl.b32 t, t, 7; add.u32 t, t, 0x14001400;"  # exponent + 5
        f"shl.b32 s, $1, 8; lop3.b32 $0, s, 0x80008000, t, {launch.AND_OR:#x}; }}"
    )
    return launch.packed(asm, twin, scale_bytes, dtype=jnp.float16, interpret=interpret)


# Bit 28 becomes the parity of the other seven low bits: it is flipped if all eight together are odd.
_PARITY = (
    "{ .reg .b32 t; and.b32 t, $1, 0x11111111; popc.b32 t, t; shl.b32 t, t, 28;"
    f"lop3.b32 $0, t, 0x10000000, $1, {launch.AND_XOR:#x}; }}"
)
# 512 + the half bit of two words.
_HALF = (
    f"{{ .reg .b32 t; prmt.b32 t, $1, $2, 0x7632; shr.u32 t, t, 12;lop3.b32 $0, t, 0x00010001, 0x60006000, {launch.AND_OR:#x}; }}"
)


def _parity_twin(words: jax.Array) -> jax.Array:
    odd = jax.lax.population_count(words & jnp.uint32(0x11111111)) & 1
    return jax.lax.bitcast_convert_type(words ^ (odd << 28), jnp.int32)


def _half_twin(words: jax.Array) -> jax.Array:
    return ((words >> 28) & 1 | 0x6000).astype(jnp.int16)


def _plane_asm(i: int, lattice: bool) -> str:
    """Nibble `i` of two words, times their scales. Arguments: the words, the halves if lattice, the scales."""
    scale = "$4" if lattice else "$3"
    halves = "0x7632" if i >= 4 else "0x5410"
    shift = f"shr.u32 t, t, {4 * (i % 4) - 1};" if i % 4 else "shl.b32 t, t, 1;"
    return (
        "{ .reg .b32 t, o, z; mov.b32 o, 0xE010E010; mov.b32 z, 0x80008000;"  # -520, -0
        f"prmt.b32 t, $1, $2, {halves}; {shift}"
        f"lop3.b32 t, t, 0x001E001E, {'$3' if lattice else '0x60006000'}, {launch.AND_OR:#x};"
        f"fma.rn.f16x2 o, {scale}, o, z; fma.rn.f16x2 $0, t, {scale}, o; }}"
    )


def _plane_twin(i: int) -> Callable[..., jax.Array]:
    def twin(words: jax.Array, *rest: jax.Array) -> jax.Array:
        *half, scale = rest
        code = ((words >> (4 * i)) & 15).astype(jnp.float32) - 8
        if half:
            code += (half[0] & 1).astype(jnp.float32) * 0.5
        return (code * scale.astype(jnp.float32)).astype(jnp.float16)

    return twin


def _from_operand_order(x: jax.Array, steps: int) -> jax.Array:
    """`[tokens, n]` with its columns where tensor cores want a thread's 4 x `steps` neighbours.

    Of 16 terms, thread t of 4 holds 2t, 2t + 1, 2t + 8 and 2t + 9.
    """
    parts = x.reshape(x.shape[0], -1, 4, steps, 2, 2)  # thread, step, high, low
    return parts.transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)


def _in_operand_order(index: jax.Array, steps: int) -> jax.Array:
    """The column of `x` that each column of `_from_operand_order(x, steps)` is."""
    low, thread, high = index % 2, index // 2 % 4, index // 8 % 2
    step, block = index // 16 % steps, index // (16 * steps)
    return (((block * 4 + thread) * steps + step) * 2 + high) * 2 + low


def _interleave(planes: list[jax.Array]) -> jax.Array:
    """Two planes `[words, tokens]` -> `[2 words, tokens]` in the order of `value_dims`."""
    words, tokens = planes[0].shape
    both = jnp.stack(planes, axis=-1).reshape(words // 8, 8, tokens, 2)
    return both.transpose(0, 3, 1, 2).reshape(2 * words, tokens)


def _float(values: jax.Array) -> jax.Array:
    """Values of float pages; bfloat16 ones are stored as uint16 words."""
    return jax.lax.bitcast_convert_type(values, jnp.bfloat16) if values.dtype.itemsize == 2 else values
