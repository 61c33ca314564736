"""Products of codes with the words turned, so that a vector holds the same k of all its columns: nothing is summed across
lanes, and the codes that are taken out of it serve many rows.

A group's integer, as a float32, times both scales is added to the sum of the groups before it, and the last sum multiplied by
the column's unit: one chain, whatever stands in a register together. So one row may be summed across lanes instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.matmul.cpu_codes import BLOCK, Shape, each_block, plane, views_of

_ACROSS = 1  # most rows for which turning words costs more than summing across lanes: the same integers


def columns(c: Any, *views: Any, shape: Shape) -> None:
    """A part of the product."""
    _, words, scales, unit, _, _, _, codes, steps = views_of(views, shape)
    sums = c.stack((shape.rows, BLOCK), jnp.float32)
    operands = _Operands(c, words, scales, codes, steps, sums, shape)

    def finish(at: Any, count: int, write: Callable[[int, Any, Any, int], None]) -> None:
        for r in range(shape.rows):

            def some(i: Any, lanes: int, r: int = r) -> None:
                write(r, i, sums.load(r, i, lanes=lanes) * unit.load(at + i, lanes=lanes), lanes)

            c.loop(0, count - count % 8, [], lambda i, some=some: some(i, 8), step=8)
            c.loop(count - count % 8, count, [], lambda i, some=some: some(i, 0))

    each_block(c, *views, shape=shape, accumulate=lambda at, count: _accumulate(c, operands, shape, at), finish=finish)


class _Operands:
    """Views of the weight as it lies in memory and of rounded activations, in pairs of words and of k."""

    def __init__(self, c: Any, words: Any, scales: Any, codes: Any, steps: Any, sums: Any, shape: Shape):
        tiles, padded = shape.weight.tiles, shape.weight.padded_columns
        self.words = c.view(words.pointer, (tiles, shape.blocks, padded, 16), jnp.int32)
        self.scales = c.view(scales.pointer, (tiles, padded), jnp.uint32 if shape.planes == 4 else jnp.uint16)
        self.codes = c.view(codes.pointer, (tiles, shape.planes, shape.rows, _pairs(shape)), jnp.int32)
        self.steps, self.sums = steps, sums
        self.turned = c.stack((_pairs(shape), _lanes()), jnp.int32)


def _pairs(shape: Shape) -> int:
    """Pairs of words of a column in a tile: pairs of k in each of its planes."""
    return shape.weight.group // 2


def _lanes() -> int:
    """Columns in a vector."""
    return 16 if cpu.here().has("avx512bw") else 8


def _accumulate(c: Any, o: _Operands, shape: Shape, at: Any) -> None:
    """o.sums `[rows, columns]` of a block of columns from `at` on."""
    wide = _lanes()
    most = wide  # sums in registers: half of them
    planes = range(shape.planes)

    def clear(i: Any) -> None:
        for r in range(shape.rows):
            o.sums.store(c.constant(0, lanes=wide), r, i)

    c.loop(0, BLOCK, [], clear, step=wide)

    def tile(t: Any) -> None:
        def columns(i: Any) -> None:
            if shape.rows > _ACROSS:
                _turn(c, o.words, o.turned, t, at + i, shape)
            word = o.scales.load(t, at + i, lanes=wide).to(c.i32, signed=False)
            scale = [(((word.shr(8 * j) if j else word) & 255) - 128).to(c.f32) for j in planes]
            for first in range(0, shape.rows, most):
                rows = range(first, min(first + most, shape.rows))
                # Planes side by side, where few rows leave registers: a vector of words is loaded once for them.
                beside = max(1, min(shape.planes, most // len(rows)))
                sums = [o.sums.load(r, i, lanes=wide) for r in rows] if beside == shape.planes else None
                for some in (planes[j : j + beside] for j in range(0, shape.planes, beside)):
                    if shape.rows > _ACROSS:
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
                for r, total in zip(rows, sums or (), strict=False):
                    o.sums.store(total, r, i)

        c.loop(0, BLOCK, [], columns, step=wide)

    c.loop(0, shape.weight.tiles, [], tile)


def _group_sums(c: Any, o: _Operands, t: Any, planes: range, rows: range, shape: Shape) -> list[list[Any]]:
    """By plane and row, the integer sums of a group for the columns in `o.turned`."""
    wide = _lanes()

    def step(p: Any, *sums: Any) -> list[Any]:
        words, new = o.turned.load(p, 0, lanes=wide, align=4 * wide).bits(c.i16, 2 * wide), []
        for j in planes:
            codes_of = plane(words, shape.weight.bits, j)
            for r in rows:
                x = c.spread(o.codes.load(t, j, r, p), wide).bits(c.i16, 2 * wide)
                new.append(sums[len(new)] + _multiply_pairs(c, codes_of, x))
        return new

    sums = c.loop(0, _pairs(shape), c.zeros(len(planes) * len(rows), c.i32, wide), step)
    return [sums[n * len(rows) : (n + 1) * len(rows)] for n in range(len(planes))]


def _sums_across(c: Any, o: _Operands, t: Any, at: Any, j: int, r: int, shape: Shape) -> Any:
    """The integer sums of a group for the columns from `at` on, each of which is first a vector of its own."""
    wide = _lanes()

    def column(i: int) -> Any:
        total = None
        for b in range(shape.blocks):
            if j == 0 and r == 0:
                c.prefetch(o.words.at(t + 1, b, at + i, 0), level=2)
            for first in range(0, 16, wide):
                words = o.words.load(t, b, at + i, first, lanes=wide).bits(c.i16, 2 * wide)
                x = o.codes.load(t, j, r, b * 16 + first, lanes=wide).bits(c.i16, 2 * wide)
                product = _multiply_pairs(c, plane(words, shape.weight.bits, j), x)
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
        return add(two[0], two[1], low, high)

    def quarters(order: list[int]) -> list[int]:
        return [4 * q + k for q in order for k in range(4)]

    if wide == 8:
        return add(four(0), four(4), quarters([0, 2]), quarters([1, 3]))
    eights = [add(four(i), four(i + 4), quarters([0, 1, 4, 5]), quarters([2, 3, 6, 7])) for i in (0, 8)]
    return add(eights[0], eights[1], quarters([0, 2, 4, 6]), quarters([1, 3, 5, 7]))


def _turn(c: Any, words: Any, turned: Any, t: Any, at: Any, shape: Shape) -> None:
    """turned `[pairs, columns]`: the pairs of words of tile t, columns from `at` on, column beside column."""
    wide = _lanes()
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
            done[k], done[4 + k] = blocks(fours[0], fours[1], [0, 2]), blocks(fours[0], fours[1], [1, 3])
            continue
        (a, b, d, e) = fours
        for half, order in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
            ab, de = blocks(a, b, order), blocks(d, e, order)
            done[8 * half + k], done[8 * half + 4 + k] = blocks(ab, de, [0, 2, 4, 6]), blocks(ab, de, [1, 3, 5, 7])
    return done


def _multiply_pairs(c: Any, a: Any, b: Any) -> Any:
    """32 or 16 lanes of int16 -> half as many of int32: a[2i] b[2i] + a[2i + 1] b[2i + 1]."""
    name = "avx512.pmaddw.d.512" if a.lanes == 32 else "avx2.pmadd.wd"
    return c.intrinsic(f"llvm.x86.{name}", c.shaped(c.i32, a.lanes // 2), a, b)
