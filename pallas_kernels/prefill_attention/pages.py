"""Pages to tensor-core operands: 64 tokens of one KV head, 64 dims at a time, two values an instruction.

Four bits: a bf16 number with the bits 0x4180 is 16 and its mantissa bits 3 to 6 are worth 1 to 8, so a nibble OR'd into
them is 16 + nibble = 24 + code, and one multiply-add makes it code x scale. All is exact: 24 x scale has 6 significant
bits, code x scale at most 8. The half of an E8 octet goes into mantissa bit 2.

Eight bits: the low seven bits of a code fill the mantissa of 128 (0x4300), and its sign bit OR'd into -128 (0xC300) makes
that -256, so their sum is the code.

Instructions take neighbouring words, so a segment of 64 dims leaves here in the order [word / 2, nibble, word % 2].
`natural_dim` undoes it: queries are turned into that order, and the last product of the epilogue turns back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kv_codecs.formats import ROTATION_GROUP, SCALE_GROUP, WORD_DIMS
from pallas_kernels.kv_codecs.rotation import hadamard
from pallas_kernels.kv_codecs.scale_byte import REBIAS, SHIFT

SEGMENT = ROTATION_GROUP  # dims a step: of a rotation group, and under one int8 scale
WORDS = SEGMENT // WORD_DIMS
SCALES = SEGMENT // SCALE_GROUP


def inverse_rotation() -> np.ndarray:
    """float32 `[64, 64]`: H64 of a row of 64 dims in the order of four-bit unpacking, which leaves them in the natural one."""
    stored, dim = np.arange(SEGMENT)[:, None], np.arange(SEGMENT)[None]
    return hadamard((stored >> 4) * 16 + (stored & 1) * 8 + ((stored >> 1) & 7), dim)


def to_stored_order(x: jax.Array) -> jax.Array:
    """`[..., D]` from the natural order of dims to that of four-bit unpacking."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2, 8), -2, -1).reshape(x.shape)


def segment(
    kind: str, codes_ref: Any, scales_ref: Any, page: Any, head: Any, g: int, tokens: Any, inside: jax.Array | None, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Dims `64 g : 64 g + 64` of some tokens of a page: exact bf16 (float32 of float32 pages) `[tokens, 64]`, and what is left
    to multiply them by, float32 `[tokens]` (None: nothing).

    kind: `float`, `int8`, `int4` or `e8`, as in `kv_codecs.formats`.
    tokens: `pl.ds` within the page. inside: mask `[tokens]` of those that mean something, None for all. Four-bit pages
    hold finite values whatever their bits, the others get zeros outside (a NaN would survive a product with 0).
    """
    if kind in ("int4", "e8"):
        words = launch.load(codes_ref, (page, head, tokens, pl.ds(g * WORDS, WORDS)))
        scales = launch.load(scales_ref, (page, head, tokens, pl.ds(g * SCALES, SCALES)))
        return four_bit(words, scales, kind == "e8", interpret), None
    dims = (page, head, tokens, pl.ds(g * SEGMENT, SEGMENT))
    if kind == "int8":
        scale = launch.load(scales_ref, (page, head, tokens, g), inside).astype(jnp.float32)
        return eight_bit(launch.load(codes_ref, dims), interpret), scale
    mask = None if inside is None else jnp.broadcast_to(inside[:, None], (*inside.shape, SEGMENT))
    values = launch.load(codes_ref, dims, mask)
    return (jax.lax.bitcast_convert_type(values, jnp.bfloat16) if values.dtype == jnp.uint16 else values), None


def four_bit(words: jax.Array, scales: jax.Array, lattice: bool, interpret: bool) -> jax.Array:
    """Exact bf16 values `[tokens, 8 n]` of words uint32 `[tokens, n]` and scale bytes uint8 `[tokens, n / 4]`."""
    tokens, n = words.shape
    planes = four_bit_planes(words, scales, lattice, interpret)
    # [tokens, n / 2, 2] for each nibble; joining the nibbles and moving the word's axis last costs nothing.
    planes = [p.reshape(tokens, n // 2, 2) for p in planes]
    for _ in range(3):
        planes = [jnp.stack([planes[i], planes[i + len(planes) // 2]], axis=-1) for i in range(len(planes) // 2)]
    # Axes now: token, word / 2, word % 2, nibble bits 2, 1, 0 in this order.
    return planes[0].transpose(0, 1, 3, 4, 5, 2).reshape(tokens, n * 8)


def four_bit_planes(words: jax.Array, scales: jax.Array, lattice: bool, interpret: bool) -> list[jax.Array]:
    """Eight bf16 blocks `[tokens, n]`: nibble i of every word, times its scale."""
    scale = scale_values(scales)
    minus = (scale * -24).astype(jnp.bfloat16)
    scale = scale.astype(jnp.bfloat16)
    scale, minus = (_for_each_word(s, words.shape) for s in (scale, minus))
    low, high = words.astype(jnp.int16), (words >> 16).astype(jnp.int16)
    base = None
    if lattice:
        base, high = _half(high, interpret), _with_parity(low, high, interpret)
    return [_nibbles(half, base, scale, minus, j, interpret) for half in (low, high) for j in range(4)]


def scale_values(scales: jax.Array) -> jax.Array:
    """Signed float32 of scale bytes: the byte is the top of a float32, see `kv_codecs.scale_byte`."""
    bits = scales.astype(jnp.int32)
    return jax.lax.bitcast_convert_type((((bits & 0x7F) << SHIFT) + REBIAS) | ((bits & 0x80) << 24), jnp.float32)


def _for_each_word(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    tokens, n = shape
    return jnp.broadcast_to(scale[:, :, None], (tokens, n // 4, 4)).reshape(tokens, n)


def _nibbles(half: jax.Array, base: jax.Array | None, scale: jax.Array, minus: jax.Array, j: int, interpret: bool) -> jax.Array:
    """Nibble j of 16-bit halves of words as bf16: (base | nibble) x scale + minus."""
    shift = f"shr.u32 t, $1, {4 * j - 3};" if j else "shl.b32 t, $1, 3;"
    add, s, m = ("$2", "$3", "$4") if base is not None else ("0x41804180", "$2", "$3")
    asm = f"{{ .reg .b32 t; {shift} lop3.b32 t, t, 0x00780078, {add}, {launch.AND_OR:#x}; fma.rn.bf16x2 $0, t, {s}, {m}; }}"

    def twin(half: jax.Array, *rest: jax.Array) -> jax.Array:
        *base, scale, minus = rest
        base = base[0].astype(jnp.int32) if base else 0x4180
        bits = (((half.astype(jnp.int32) >> (4 * j)) & 15) << 3) | base
        value = jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16).astype(jnp.float32)
        return (value * scale.astype(jnp.float32) + minus.astype(jnp.float32)).astype(jnp.bfloat16)

    args = [half, scale, minus] if base is None else [half, base, scale, minus]
    return launch.packed(asm, twin, *args, dtype=jnp.bfloat16, interpret=interpret)


def _half(high: jax.Array, interpret: bool) -> jax.Array:
    """16 as bf16 bits, plus half a code step where an octet's coset bit (28 of the word) is set; int16."""
    asm = f"{{ .reg .b32 t; shr.u32 t, $1, 10; lop3.b32 $0, t, 0x00040004, 0x41804180, {launch.AND_OR:#x}; }}"

    def twin(high: jax.Array) -> jax.Array:
        return (((high.astype(jnp.int32) >> 10) & 4) | 0x4180).astype(jnp.int16)

    return launch.packed(asm, twin, high, dtype=jnp.int16, interpret=interpret)


def _with_parity(low: jax.Array, high: jax.Array, interpret: bool) -> jax.Array:
    """The high half of words whose bit 28 is the parity of the seven other nibbles' lowest bits again; int16."""
    asm = (
        "{ .reg .b32 x, y; and.b32 y, $2, 0x01110111;"
        f"lop3.b32 x, $1, 0x11111111, y, {launch.AND_XOR:#x};"
        "shr.u32 y, x, 4; xor.b32 x, x, y; shr.u32 y, x, 8; xor.b32 x, x, y; shl.b32 x, x, 12;"
        f"mov.b32 y, 0x10001000; lop3.b32 $0, y, x, $2, {launch.SELECT:#x}; }}"
    )

    def twin(low: jax.Array, high: jax.Array) -> jax.Array:
        low, high = low.astype(jnp.int32), high.astype(jnp.int32)
        x = (low & 0x1111) ^ (high & 0x0111)
        x ^= x >> 4
        x ^= x >> 8
        return ((high & 0xEFFF) | ((x & 1) << 12)).astype(jnp.int16)

    return launch.packed(asm, twin, low, high, dtype=jnp.int16, interpret=interpret)


def eight_bit(codes: jax.Array, interpret: bool) -> jax.Array:
    """Exact bf16 of int8 codes."""
    asm = (
        "{ .reg .b32 m, o, one;"
        f"lop3.b32 m, $1, 0x007F007F, 0x43004300, {launch.AND_OR:#x}; lop3.b32 o, $1, 0x00800080, 0xC300C300, {launch.AND_OR:#x};"
        "mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, m, one, o; }"
    )

    def twin(bits: jax.Array) -> jax.Array:
        return ((bits.astype(jnp.int32) & 255 ^ 128) - 128).astype(jnp.bfloat16)

    # Nothing is added, but the compiler sees an operand it cannot load: it would otherwise move codes through shared memory
    # and unpack them behind it, in every warp instead of once.
    nothing = jnp.where(jax.lax.broadcasted_iota(jnp.int32, codes.shape, 0) < 0, jnp.int16(1), jnp.int16(0))
    return launch.packed(asm, twin, codes.astype(jnp.int16) | nothing, dtype=jnp.bfloat16, interpret=interpret)
