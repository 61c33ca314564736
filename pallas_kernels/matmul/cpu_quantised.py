"""Projections of a few rows on a CPU over weights of 4 or 8 bits, read as `quantised` stores them: an artifact's files can be
mapped as they are.

Activations are rounded to int16 per row and group of the weight's (the group's largest magnitude is 32,767), products are
summed in integers: exact, in whatever order an instruction likes, `vpmaddwd` under AVX2 as under AVX-512. A group's
integer, as a float32, times both scales is added to the sum of the groups before it, and the last sum multiplied by the
column's unit: one chain, whatever stands in a register together. The rounding is 2^-16 of a group's largest activation:
below what bfloat16 activations lose.

A block of 64 columns is 4 KiB of consecutive memory for each 32 of k. Its words are turned so that a vector holds the same
k of all its columns: nothing is summed across lanes, and the codes that are taken out of it serve many rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.matmul.cpu import inverse_rms, normed, parts_for
from pallas_kernels.matmul.quantised import QuantisedWeight

ROWS = 32
_BLOCK = 64  # columns; divides the padding of weights
# Most rows, by bits, for which turning words costs more than summing across lanes. The sums are integers: the same bits.
_ACROSS = {4: 1, 8: 4}
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
    def pairs(self) -> int:
        """Pairs of words of a column in a tile: pairs of k in each of its planes."""
        return self.weight.group // 2

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
    groups = (weight.tiles, shape.planes, shape.rows)
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
            steps.store(c.select(there, peak / float(_TOP), 0.0), g // shape.planes, g % shape.planes, r)
            for b in range(shape.blocks):
                pair = [c.round(v * factor).to(c.i32).to(c.i16) for v in values[2 * b : 2 * b + 2]]
                codes.store(c.join(*pair).take(_ORDER), g // shape.planes, g % shape.planes, r, b, 0)

        full = k // group
        c.loop(0, full, [], lambda g: one(g, g * group, group))
        for g in range(full, shape.weight.tiles * shape.planes):
            one(c.index(g), c.index(g * group), max(0, k - g * group))

    c.loop(0, shape.rows, [], row)


def _columns(c: Any, *views: Any, shape: _Shape) -> None:
    _, words, scales, unit, _, residual, out, codes, steps = _views(views, shape)
    sums = c.stack((shape.rows, _BLOCK), jnp.float32)
    gates: Any = c.stack((shape.rows, _BLOCK), jnp.float32) if shape.swiglu else None
    accumulate = functools.partial(_accumulate, c, _Operands(c, words, scales, codes, steps, sums, shape), shape)

    def block(at: Any, count: int) -> None:
        def finish(from_: Any, write: Any) -> None:
            """write(r, i, y) for each row and the columns at + i, 8 or, at the end, one."""
            for r in range(shape.rows):

                def some(i: Any, lanes: int, r: int = r) -> None:
                    write(r, i, sums.load(r, i, lanes=lanes) * unit.load(from_ + i, lanes=lanes), lanes)

                c.loop(0, count - count % 8, [], lambda i, some=some: some(i, 8), step=8)
                c.loop(count - count % 8, count, [], lambda i, some=some: some(i, 0))

        def store(r: int, i: Any, y: Any, lanes: int) -> None:
            if shape.swiglu:
                y = c.silu(gates.load(r, i, lanes=lanes)) * y
            if residual is not None:
                y = y + residual.load(r, at + i, lanes=lanes)
            out.store(y, r, at + i)

        accumulate(at)
        if shape.swiglu:
            finish(at, lambda r, i, y, lanes: gates.store(y, r, i))
            accumulate(at + shape.out)
        finish(at + shape.out if shape.swiglu else at, store)

    whole = shape.out // _BLOCK
    start, stop = c.share(whole, shape.parts)
    c.loop(start, stop, [], lambda i: block(i * _BLOCK, _BLOCK))
    if shape.out % _BLOCK:
        with c.when(c.part.equals(shape.parts - 1)):
            block(c.index(whole * _BLOCK), shape.out % _BLOCK)


class _Operands:
    """Views of the weight as it lies in memory and of rounded activations, in pairs of words and of k."""

    def __init__(self, c: Any, words: Any, scales: Any, codes: Any, steps: Any, sums: Any, shape: _Shape):
        tiles, padded = shape.weight.tiles, shape.weight.padded_columns
        self.words = c.view(words.pointer, (tiles, shape.blocks, padded, 16), jnp.int32)
        self.scales = c.view(scales.pointer, (tiles, padded), jnp.uint32 if shape.planes == 4 else jnp.uint16)
        self.codes = c.view(codes.pointer, (tiles, shape.planes, shape.rows, shape.pairs), jnp.int32)
        self.steps, self.sums = steps, sums
        self.turned = c.stack((shape.pairs, lanes()), jnp.int32)


def lanes() -> int:
    """Columns in a vector."""
    return 16 if cpu.here().has("avx512bw") else 8


def _accumulate(c: Any, o: _Operands, shape: _Shape, at: Any) -> None:
    """o.sums `[rows, columns]` of a block of columns from `at` on."""
    wide = lanes()
    most = wide  # sums in registers: half of them
    planes = range(shape.planes)

    def clear(i: Any) -> None:
        for r in range(shape.rows):
            o.sums.store(c.constant(0, lanes=wide), r, i)

    c.loop(0, _BLOCK, [], clear, step=wide)

    def tile(t: Any) -> None:
        def columns(i: Any) -> None:
            if shape.rows > _ACROSS[shape.weight.bits]:
                turn(c, o.words, o.turned, t, at + i, shape)
            word = o.scales.load(t, at + i, lanes=wide).to(c.i32, signed=False)
            scale = [(((word.shr(8 * j) if j else word) & 255) - 128).to(c.f32) for j in planes]
            for first in range(0, shape.rows, most):
                rows = range(first, min(first + most, shape.rows))
                # Planes side by side, where few rows leave registers: a vector of words is loaded once for them.
                beside = max(1, min(shape.planes, most // len(rows)))
                sums = [o.sums.load(r, i, lanes=wide) for r in rows] if beside == shape.planes else None
                for some in (planes[j : j + beside] for j in range(0, shape.planes, beside)):
                    if shape.rows > _ACROSS[shape.weight.bits]:
                        totals = _group_sums(c, o, t, some, rows, shape)
                    else:
                        totals = [[_sums_across(c, o, t, at + i, j, r, shape) for r in rows] for j in some]
                    for j, whole in zip(some, totals, strict=True):
                        for n, r in enumerate(rows):
                            factor = scale[j] * o.steps.load(t, j, r)
                            if sums is None:
                                o.sums.store(c.fma(whole[n].to(c.f32), factor, o.sums.load(r, i, lanes=wide)), r, i)
                            else:
                                sums[n] = c.fma(whole[n].to(c.f32), factor, sums[n])
                for n, r in enumerate(rows if sums else ()):
                    o.sums.store(sums[n], r, i)

        c.loop(0, _BLOCK, [], columns, step=wide)

    c.loop(0, shape.weight.tiles, [], tile)


def _group_sums(c: Any, o: _Operands, t: Any, planes: range, rows: range, shape: _Shape) -> list[list[Any]]:
    """By plane and row, the integer sums of a group for the columns in `o.turned`."""
    wide = lanes()

    def step(p: Any, *sums: Any) -> list[Any]:
        words, new = o.turned.load(p, 0, lanes=wide, align=4 * wide).bits(c.i16, 2 * wide), []
        for j in planes:
            plane = _codes(words, shape.weight.bits, j)
            for r in rows:
                x = c.spread(o.codes.load(t, j, r, p), wide).bits(c.i16, 2 * wide)
                new.append(sums[len(new)] + multiply_pairs(c, plane, x))
        return new

    sums = c.loop(0, shape.pairs, c.zeros(len(planes) * len(rows), c.i32, wide), step)
    return [sums[n * len(rows) : (n + 1) * len(rows)] for n in range(len(planes))]


def _sums_across(c: Any, o: _Operands, t: Any, at: Any, j: int, r: int, shape: _Shape) -> Any:
    """The integer sums of a group for the columns from `at` on, each of which is first a vector of its own."""
    wide = lanes()

    def column(i: int) -> Any:
        total = None
        for b in range(shape.blocks):
            if j == 0 and r == 0:
                c.prefetch(o.words.at(t + 1, b, at + i, 0), level=2)
            for first in range(0, 16, wide):
                words = o.words.load(t, b, at + i, first, lanes=wide).bits(c.i16, 2 * wide)
                x = o.codes.load(t, j, r, b * 16 + first, lanes=wide).bits(c.i16, 2 * wide)
                product = multiply_pairs(c, _codes(words, shape.weight.bits, j), x)
                total = product if total is None else total + product
        return total

    def add(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
        return a.take(low, b) + a.take(high, b)

    def four(i: int) -> Any:
        """Columns i .. i + 3 in every 128 bits."""
        quarters = range(0, wide, 4)
        low, high = ([q + k + o for q in quarters for k in ks for o in (0, wide)] for ks in ((0, 1), (2, 3)))
        two = [add(column(i + k), column(i + k + 1), low, high) for k in (0, 2)]
        low, high = ([q + k + o for q in quarters for o in (0, wide) for k in ks] for ks in ((0, 1), (2, 3)))
        return add(*two, low, high)

    def quarters(order: list[int]) -> list[int]:
        return [4 * q + k for q in order for k in range(4)]

    if wide == 8:
        return add(four(0), four(4), quarters([0, 2]), quarters([1, 3]))
    eights = [add(four(i), four(i + 4), quarters([0, 1, 4, 5]), quarters([2, 3, 6, 7])) for i in (0, 8)]
    return add(*eights, quarters([0, 2, 4, 6]), quarters([1, 3, 5, 7]))


def turn(c: Any, words: Any, turned: Any, t: Any, at: Any, shape: _Shape) -> None:
    """turned `[pairs, columns]`: the pairs of words of tile t, columns from `at` on, column beside column."""
    wide = lanes()
    for b in range(shape.blocks):
        for first in range(0, 16, wide):
            columns = [words.load(t, b, at + i, first, lanes=wide) for i in range(wide)]
            for i in range(wide if first == 0 else 0):
                c.prefetch(words.at(t + 1, b, at + i, 0), level=2)
            for p, v in enumerate(_transposed(columns)):
                turned.store(v, b * 16 + first + p, 0, align=4 * wide)


def _transposed(rows: list[Any]) -> list[Any]:
    """A square of 8 or 16 vectors of as many 32-bit lanes, turned: by steps that each are one instruction."""
    n = len(rows)
    quarters = range(0, n, 4)  # of 128 bits

    def low(a: Any, b: Any, lanes: list[int]) -> Any:
        return a.take([q + i % 4 + n * (i // 4) for q in quarters for i in lanes], b)

    found = [[] for _ in range(4)]  # by k in a quarter, the fours of rows
    for r in range(0, n, 4):
        a, b, d, e = rows[r : r + 4]
        ab, de = low(a, b, [0, 4, 1, 5]), low(d, e, [0, 4, 1, 5])
        ab_, de_ = low(a, b, [2, 6, 3, 7]), low(d, e, [2, 6, 3, 7])
        for k, (p, q) in enumerate([(ab, de), (ab, de), (ab_, de_), (ab_, de_)]):
            found[k].append(low(p, q, [0, 1, 4, 5] if k % 2 == 0 else [2, 3, 6, 7]))

    def blocks(a: Any, b: Any, order: list[int]) -> Any:
        """Quarters of a and b, those of b counting on."""
        return a.take([4 * q + i for q in order for i in range(4)], b)

    done: list[Any] = [None] * n
    for k, fours in enumerate(found):
        if n == 8:
            done[k], done[4 + k] = blocks(*fours, [0, 2]), blocks(*fours, [1, 3])
            continue
        (a, b, d, e) = fours
        for half, order in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
            ab, de = blocks(a, b, order), blocks(d, e, order)
            done[8 * half + k], done[8 * half + 4 + k] = blocks(ab, de, [0, 2, 4, 6]), blocks(ab, de, [1, 3, 5, 7])
    return done


def _codes(words: Any, bits: int, j: int) -> Any:
    """Plane j of words as signed int16."""
    left = 16 - bits * (j + 1)
    return ((words << left) if left else words) >> (16 - bits)


def multiply_pairs(c: Any, a: Any, b: Any) -> Any:
    """32 or 16 lanes of int16 -> half as many of int32: a[2i] b[2i] + a[2i + 1] b[2i + 1]."""
    name = "avx512.pmaddw.d.512" if a.lanes == 32 else "avx2.pmadd.wd"
    return c.intrinsic(f"llvm.x86.{name}", c.shaped(c.i32, a.lanes // 2), a, b)
