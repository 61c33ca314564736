"""Codes to bf16 inside a kernel, two at a time and without a conversion instruction.

A bf16 number with the bits 0x4300 is 128 and its last mantissa bit is worth 1, so a nibble OR'd into it is 128 + nibble;
one packed multiply-add takes the offset away. Every value on the way is an integer of at most 8 significant bits, so
nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import launch


def plane(words: jax.Array, bits: int, j: int, columns: int, interpret: bool) -> jax.Array:
    """Plane `j` of a block of words `[G / 32, columns * 32]` as exact bf16 codes `[G, columns]`.

    The reshape follows the storage order of `quantised`, which is that of a tensor core's operand: it costs nothing.
    """
    asm, twin = to_bf16(bits, j)
    codes = launch.packed(asm, twin, words, dtype=jnp.bfloat16, interpret=interpret)
    blocks = words.shape[0]
    codes = codes.reshape(blocks, columns // 8, 8, 4, 2, 2, 2).transpose(0, 4, 5, 3, 6, 1, 2)
    return codes.reshape(blocks * 32, columns)


def _nibble(register: str, shift: int, table: int, magic: int) -> str:
    """PTX: the nibbles of two words from bit `shift` on, put into the number `magic` by the lop3 `table`."""
    take = f"shr.u32 {register}, $1, {shift};" if shift else f"mov.b32 {register}, $1;"
    return f"{take} lop3.b32 {register}, {register}, 0x000F000F, {magic:#x}, {table:#x};"


def to_bf16(bits: int, j: int) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    """Plane `j` of int16 words as bf16, elementwise: PTX on two words at a time, and what it says in jnp."""
    return _w4(j) if bits == 4 else _w8(j)


def _w4(j: int) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    asm = (
        "{ .reg .b32 t, one, off; mov.b32 one, 0x3F803F80; mov.b32 off, 0xC308C308;"  # 1, -136
        + _nibble("t", 4 * j, launch.AND_XOR, 0x43084308)  # 128 + (nibble ^ 8)
        + "fma.rn.bf16x2 $0, t, one, off; }"
    )

    def twin(w: jax.Array) -> jax.Array:
        return (((w.astype(jnp.int32) >> (4 * j)) & 15 ^ 8) - 8).astype(jnp.bfloat16)

    return asm, twin


def _w8(j: int) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    asm = (
        "{ .reg .b32 h, l, c, one, off; mov.b32 c, 0x41804180; mov.b32 one, 0x3F803F80; mov.b32 off, 0xC510C510;"
        + _nibble("l", 8 * j, launch.AND_OR, 0x43004300)  # 128 + low
        + _nibble("h", 8 * j + 4, launch.AND_XOR, 0x43084308)  # 136 + high, signed
        + "fma.rn.bf16x2 h, h, c, off;"  # x 16 - 2304 = 16 high - 128
        + "fma.rn.bf16x2 $0, l, one, h; }"
    )

    def twin(w: jax.Array) -> jax.Array:
        return (((w.astype(jnp.int32) >> (8 * j)) & 255 ^ 128) - 128).astype(jnp.bfloat16)

    return asm, twin


def plane_s8(words: jax.Array, bits: int, j: int, columns: int, interpret: bool) -> jax.Array:
    """Plane `j` as int8 `[G, columns]` for 8-bit tensor cores: the codes of w8, 16 x the codes of w4.

    Rows come in the order that operand wants, `permute_k` of the natural one.
    """
    byte = "prmt.b32 $0, $1, $2, %s;" % ("0x7531" if (j if bits == 8 else j // 2) else "0x6420")
    if bits == 4:
        byte = byte.replace("$0", "p") + ("shl.b32 p, p, 4;" if j % 2 == 0 else "")
        byte = "{ .reg .b32 p; " + byte + "and.b32 $0, p, 0xF0F0F0F0; }"

    def twin(w: jax.Array) -> jax.Array:
        w = w.astype(jnp.int32)
        value = (w >> (8 * j)) & 255 if bits == 8 else ((w >> (4 * j)) & 15) << 4
        return ((value ^ 128) - 128).astype(jnp.int8)

    codes = launch.packed(byte, twin, words, dtype=jnp.int8, interpret=interpret, pack=4)
    blocks = words.shape[0]
    codes = codes.reshape(blocks, columns // 8, 8, 4, 2, 4).transpose(0, 4, 3, 5, 1, 2)
    return codes.reshape(blocks * 32, columns)


def permute_k(x: jax.Array) -> jax.Array:
    """The last axis in the order of `plane_s8`: in each 16, (half, lane, low bit) becomes (lane, half, low bit)."""
    parts = x.reshape(*x.shape[:-1], -1, 2, 4, 2)
    return jnp.swapaxes(parts, -3, -2).reshape(x.shape)


def scale(words: jax.Array, j: int, interpret: bool) -> jax.Array:
    """The scales of a tile's group `j` as float32, from the words `[columns]` of its scales."""
    asm, twin = to_scale(j)
    return launch.packed(asm, twin, words.astype(jnp.int32), dtype=jnp.float32, interpret=interpret, pack=1)


def to_scale(j: int) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    """Byte `j` of int32 words less 128 as float32: PTX and what it says in jnp. The byte becomes the end of the float 2^23."""

    def twin(w: jax.Array) -> jax.Array:
        return (((w >> (8 * j)) & 255) - 128).astype(jnp.float32)

    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0x4B000000, 0x765{j:x}; add.rn.f32 $0, t, 0fCB000080; }}", twin


ONE_PLUS = "fma.rn.bf16x2 $0, $1, $2, $1;"  # x (1 + w)


def one_plus(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (1 + w) in jnp, as `ONE_PLUS` has it."""
    return (x.astype(jnp.float32) * (1 + w.astype(jnp.float32))).astype(jnp.bfloat16)


def times_one_plus(x: jax.Array, w: jax.Array, interpret: bool) -> jax.Array:
    """bf16 x (1 + w), rounded once."""
    return launch.packed(ONE_PLUS, one_plus, x, w, dtype=jnp.bfloat16, interpret=interpret)


def times(x: jax.Array, w: jax.Array, interpret: bool) -> jax.Array:
    """bf16 x w, rounded once."""

    def twin(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * w.astype(jnp.float32)).astype(jnp.bfloat16)

    asm = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"  # + -0
    return launch.packed(asm, twin, x, w, dtype=jnp.bfloat16, interpret=interpret)
