"""Projections of a few rows on a CPU over weights of 4 or 8 bits, read as `quantised` stores them: an artifact's files can be
mapped as they are.

Activations are rounded to int16 per row and group of the weight's (the group's largest magnitude is 32,767), products are
summed in integers: exact, in whatever order an instruction likes, `vpmaddwd` under AVX2 as under AVX-512. Each group's
integer, in 8 lanes, times both scales is added to 8 lanes of float32, group after group; the lanes are added by halves
and multiplied by the column's unit. The rounding is 2^-16 of a group's largest activation: below what bfloat16
activations lose. A block of 64 columns is 4 KiB of consecutive memory for each 32 of k.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.matmul.cpu import inverse_rms, normed, parts_for, sum_each
from pallas_kernels.matmul.quantised import QuantisedWeight

ROWS = 32
_BLOCK = 64  # columns; divides the padding of weights
_TOGETHER = 4  # rows over the same unpacked codes
_TOP = 32767
# Word p of a column's 32 holds k = _ORDER[p]: (lane, half, b3, b0) -> 16 half + 8 b3 + 2 lane + b0, see `quantised`.
_ORDER = [16 * half + 8 * b3 + 2 * lane + b0 for lane in range(4) for half in range(2) for b3 in range(2) for b0 in range(2)]


@dataclasses.dataclass(frozen=True)
class _Shape:
    rows: int
    weight: QuantisedWeight  # of shape structs
    normed: bool
    swiglu: bool
    added: bool
    eps: float

    @property
    def out(self) -> int:
        n = self.weight.shape[1]
        return n // 2 if self.swiglu else n

    @property
    def planes(self) -> int:
        return 16 // self.weight.bits

    @property
    def blocks(self) -> int:
        """Blocks of 32 k in a group."""
        return self.weight.group // 32

    @property
    def units(self) -> int:
        return -(-self.out // _BLOCK)

    @property
    def parts(self) -> int:
        return parts_for(self.weight.nbytes, self.units)


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
    shape = _Shape(x.shape[0], described, norm is not None, swiglu, residual is not None, eps)
    operands = [a for a in (x, weight.words, weight.scales, weight.unit, norm, residual) if a is not None]
    groups = (shape.rows, weight.tiles, shape.planes)
    call = cpu.kernel(
        f"w{weight.bits}" + "_norm" * shape.normed + "_swiglu" * swiglu + "_add" * shape.added,
        functools.partial(_columns, shape=shape),
        operands,
        [jax.ShapeDtypeStruct((shape.rows, shape.out), out_dtype)],
        parts=shape.parts,
        before=functools.partial(_round_activations, shape=shape),
        workspace=[jax.ShapeDtypeStruct((*groups, shape.blocks, 32), jnp.int16), jax.ShapeDtypeStruct(groups, jnp.float32)],
    )
    return call(*operands)[0]


def _views(views: tuple[Any, ...], shape: _Shape) -> tuple[Any, ...]:
    """x, words, scales, unit, norm, residual, out, rounded activations, their steps."""
    x, words, scales, unit, *rest = views
    norm = rest.pop(0) if shape.normed else None
    residual = rest.pop(0) if shape.added else None
    return (x, words, scales, unit, norm, residual, *rest)


def _round_activations(c: Any, *views: Any, shape: _Shape) -> None:
    x, _, _, _, norm, _, _, codes, steps = _views(views, shape)
    k, group = shape.weight.shape[0], shape.weight.group

    def row(r: Any) -> None:
        scale = inverse_rms(c, x, r, k, shape.eps) if shape.normed else None

        def read(i: Any, beyond: int) -> Any:
            """16 values from k = i on; those past the end of x are zeros. beyond: how many."""
            if beyond <= 0:
                return normed(c, x, norm, scale, r, i, 16)
            there = [normed(c, x, norm, scale, r, i + j, 0) for j in range(16 - beyond)] if beyond < 16 else []
            return c.vector(there + c.zeros(16 - len(there), lanes=0))

        def one(g: Any, start: Any, left: int) -> None:
            """Group g, of which `left` values are there."""
            values = [read(start + i, 16 - (left - i)) for i in range(0, group, 16)]
            peak = c.abs(values[0])
            for v in values[1:]:
                peak = c.maximum(peak, c.abs(v))
            peak = peak.max()
            # A group of tiny values counts as zeros: its factor would be infinite.
            there = peak > 1e-30
            factor = c.select(there, float(_TOP) / peak, 0.0)
            steps.store(c.select(there, peak / float(_TOP), 0.0), r, g // shape.planes, g % shape.planes)
            for b in range(shape.blocks):
                pair = [c.round(v * factor).to(c.i32).to(c.i16) for v in values[2 * b : 2 * b + 2]]
                codes.store(c.join(*pair).take(_ORDER), r, g // shape.planes, g % shape.planes, b, 0)

        full = k // group
        c.loop(0, full, [], lambda g: one(g, g * group, group))
        for g in range(full, shape.weight.tiles * shape.planes):
            one(c.index(g), c.index(g * group), max(0, k - g * group))

    c.loop(0, shape.rows, [], row)


def _columns(c: Any, *views: Any, shape: _Shape) -> None:
    _, words, scales, unit, _, residual, out, codes, steps = _views(views, shape)
    sums = c.stack((shape.rows, _BLOCK, 8), jnp.float32)
    # The memory of the weight as it is: block rows of 32 k, columns, 32 words; tiles, columns, bytes.
    padded = shape.weight.padded_columns
    words = c.view(words.pointer, (shape.weight.tiles * shape.blocks, padded, 32), jnp.int16)
    scales = c.view(scales.pointer, (shape.weight.tiles, padded, shape.planes), jnp.uint8)
    gates: Any = c.stack((shape.rows, _BLOCK), jnp.float32) if shape.swiglu else None

    def finish(write: Any, at: Any, count: int) -> None:
        """write(r, i, y) for the sums of columns at + i, `count` of them; 8 lanes or, at the end, scalars."""

        def eight(i: Any, lanes: int) -> None:
            for r in range(shape.rows):
                y = sum_each([sums.load(r, i + j, 0, lanes=8) for j in range(8)])
                if lanes == 8:
                    write(r, i, y * unit.load(at + i, lanes=8), 8)
                else:
                    for j in range(lanes):
                        write(r, i + j, y.lane(j) * unit.load(at + i + j), 0)

        c.loop(0, count - count % 8, [], lambda i: eight(i, 8), step=8)
        if count % 8:
            eight(c.index(count - count % 8), count % 8)

    def block(at: Any, count: int) -> None:
        def write(r: int, i: Any, y: Any, lanes: int) -> None:
            if shape.swiglu:
                y = c.silu(gates.load(r, i, lanes=lanes)) * y
            if residual is not None:
                y = y + residual.load(r, at + i, lanes=lanes)
            out.store(y, r, at + i)

        _accumulate(c, words, scales, codes, steps, sums, at, count, shape)
        if shape.swiglu:
            finish(lambda r, i, y, lanes: gates.store(y, r, i), at, count)
            _accumulate(c, words, scales, codes, steps, sums, at + shape.out, count, shape)
            finish(write, at + shape.out, count)
        else:
            finish(write, at, count)

    whole = shape.out // _BLOCK
    start, stop = c.share(whole, shape.parts)
    c.loop(start, stop, [], lambda i: block(i * _BLOCK, _BLOCK))
    if shape.out % _BLOCK:
        with c.when(c.part.equals(shape.parts - 1)):
            block(c.index(whole * _BLOCK), shape.out % _BLOCK)


def _accumulate(c: Any, words: Any, scales: Any, codes: Any, steps: Any, sums: Any, at: Any, count: int, shape: _Shape) -> None:
    """sums `[rows, columns, 8]` of columns at .. at + count."""
    zero = c.constant(0, lanes=8)

    def clear(i: Any) -> None:
        for r in range(shape.rows):
            sums.store(zero, r, i, 0)

    c.loop(0, count, [], clear)

    def tile(t: Any) -> None:
        for first in range(0, shape.rows, _TOGETHER):
            rows = range(first, min(first + _TOGETHER, shape.rows))

            def column(i: Any, rows: range = rows) -> None:
                read = [words.load(t * shape.blocks + b, at + i, 0, lanes=32) for b in range(shape.blocks)]
                if rows.start == 0:
                    for b in range(shape.blocks):
                        c.prefetch(words.at((t + 1) * shape.blocks + b, at + i, 0))
                scale = (scales.load(t, at + i, 0, lanes=shape.planes).to(c.i32, signed=False) - 128).to(c.f32)
                both = [scale * steps.load(r, t, 0, lanes=shape.planes) for r in rows]
                totals = [sums.load(r, i, 0, lanes=8) for r in rows]
                for j in range(shape.planes):
                    plane = [_codes(v, shape.weight.bits, j) for v in read]
                    for n, r in enumerate(rows):
                        products = [multiply_pairs(c, p, codes.load(r, t, j, b, 0, lanes=32)) for b, p in enumerate(plane)]
                        whole = products[0]
                        for p in products[1:]:
                            whole = whole + p
                        eight = whole.take(range(8)) + whole.take(range(8, 16))
                        totals[n] = c.fma(eight.to(c.f32), c.spread(both[n].lane(j), 8), totals[n])
                for n, r in enumerate(rows):
                    sums.store(totals[n], r, i, 0)

            c.loop(0, count, [], column)

    c.loop(0, shape.weight.tiles, [], tile)


def _codes(words: Any, bits: int, j: int) -> Any:
    """Plane j of 32 words as signed int16."""
    left = 16 - bits * (j + 1)
    return ((words << left) if left else words) >> (16 - bits)


def multiply_pairs(c: Any, a: Any, b: Any) -> Any:
    """32 lanes of int16 -> 16 lanes of int32: a[2i] b[2i] + a[2i + 1] b[2i + 1]."""
    if cpu.here().has("avx512bw"):
        return c.intrinsic("llvm.x86.avx512.pmaddw.d.512", c.shaped(c.i32, 16), a, b)
    halves = [(a.take(h), b.take(h)) for h in (range(16), range(16, 32))]
    return c.join(*(c.intrinsic("llvm.x86.avx2.pmadd.wd", c.shaped(c.i32, 8), p, q) for p, q in halves))
