"""Products of codes, column by column: one load takes 32 words of a column, and nothing crosses lanes before the end.

Each group's integer, in 8 lanes, times both scales is added to 8 lanes of float32, group after group; the lanes are added by
halves and multiplied by the column's unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.matmul.cpu import sum_each
from pallas_kernels.matmul.cpu_codes import BLOCK, Shape, each_block, plane, views_of

_TOGETHER = 4  # rows over the same unpacked codes


def columns(c: Any, *views: Any, shape: Shape) -> None:
    """A part of the product."""
    _, words, scales, unit, _, _, _, codes, steps = views_of(views, shape)
    sums = c.stack((shape.rows, BLOCK, 8), jnp.float32)
    # The memory of the weight as it is: block rows of 32 k, columns, 32 words; tiles, columns, bytes.
    padded = shape.weight.padded_columns
    words = c.view(words.pointer, (shape.weight.tiles * shape.blocks, padded, 32), jnp.int16)
    scales = c.view(scales.pointer, (shape.weight.tiles, padded, shape.planes), jnp.uint8)

    def finish(at: Any, count: int, write: Callable[[int, Any, Any, int], None]) -> None:
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

    def accumulate(at: Any, count: int) -> None:
        _accumulate(c, words, scales, codes, steps, sums, at, count, shape)

    each_block(c, *views, shape=shape, accumulate=accumulate, finish=finish)


def _accumulate(c: Any, words: Any, scales: Any, codes: Any, steps: Any, sums: Any, at: Any, count: int, shape: Shape) -> None:
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
                    codes_of = [plane(v, shape.weight.bits, j) for v in read]
                    for n, r in enumerate(rows):
                        products = [_multiply_pairs(c, p, codes.load(r, t, j, b, 0, lanes=32)) for b, p in enumerate(codes_of)]
                        whole = products[0]
                        for p in products[1:]:
                            whole = whole + p
                        eight = whole.take(range(8)) + whole.take(range(8, 16))
                        totals[n] = c.fma(eight.to(c.f32), c.spread(both[n].lane(j), 8), totals[n])
                for n, r in enumerate(rows):
                    sums.store(totals[n], r, i, 0)

            c.loop(0, count, [], column)

    c.loop(0, shape.weight.tiles, [], tile)


def _multiply_pairs(c: Any, a: Any, b: Any) -> Any:
    """32 lanes of int16 -> 16 lanes of int32: a[2i] b[2i] + a[2i + 1] b[2i + 1]."""
    if cpu.here().has("avx512bw"):
        return c.intrinsic("llvm.x86.avx512.pmaddw.d.512", c.shaped(c.i32, 16), a, b)
    halves = [(a.take(h), b.take(h)) for h in (range(16), range(16, 32))]
    return c.join(*(c.intrinsic("llvm.x86.avx2.pmadd.wd", c.shaped(c.i32, 8), p, q) for p, q in halves))
