"""Parts that all products of codes share on a CPU: rounded activations, the walk over blocks of columns, codes out of words.

Activations are rounded to int16 per row and group of the weight's: the group's largest magnitude is 32,767. That is 2^-16 of
it: below what bfloat16 activations lose. A block of 64 columns is 4 KiB of consecutive memory for each 32 of k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.matmul.cpu import inverse_rms, normed, parts_for
from pallas_kernels.matmul.quantised import QuantisedWeight

BLOCK = 64  # columns; divides the padding of weights
_TOP = 32767
# Word p of a column's 32 holds k = _ORDER[p]: (lane, half, b3, b0) -> 16 half + 8 b3 + 2 lane + b0, see `quantised`.
_ORDER = [16 * half + 8 * b3 + 2 * lane + b0 for lane in range(4) for half in range(2) for b3 in range(2) for b0 in range(2)]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call: what the code depends on."""

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
        return -(-self.out // BLOCK)

    @property
    def parts(self) -> int:
        return parts_for(self.weight.nbytes, self.units)


def views_of(views: tuple[Any, ...], shape: Shape) -> tuple[Any, ...]:
    """x, words, scales, unit, norm, residual, out, rounded activations, their steps."""
    x, words, scales, unit, *rest = views
    norm = rest.pop(0) if shape.normed else None
    residual = rest.pop(0) if shape.added else None
    return (x, words, scales, unit, norm, residual, *rest)


def round_activations(c: Any, *views: Any, shape: Shape, rows_first: bool) -> None:
    """codes `[tiles, planes, rows, blocks, 32]` in the words' order and steps `[tiles, planes, rows]`; or rows come first."""
    x, _, _, _, norm, _, _, codes, steps = views_of(views, shape)
    k, group = shape.weight.shape[0], shape.weight.group

    def row(r: Any) -> None:
        scale = inverse_rms(c, x, r, k, shape.eps) if shape.normed else None

        def place(g: Any) -> tuple[Any, ...]:
            where = (g // shape.planes, g % shape.planes)
            return (r, *where) if rows_first else (*where, r)

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
            steps.store(c.select(there, peak / float(_TOP), 0.0), *place(g))
            for b in range(shape.blocks):
                pair = [c.round(v * factor).to(c.i32).to(c.i16) for v in values[2 * b : 2 * b + 2]]
                codes.store(c.join(*pair).take(_ORDER), *place(g), b, 0)

        full = k // group
        c.loop(0, full, [], lambda g: one(g, g * group, group))
        for g in range(full, shape.weight.tiles * shape.planes):
            one(c.index(g), c.index(g * group), max(0, k - g * group))

    c.loop(0, shape.rows, [], row)


def each_block(
    c: Any,
    *views: Any,
    shape: Shape,
    accumulate: Callable[[Any, int], None],
    finish: Callable[[Any, int, Callable[[int, Any, Any, int], None]], None],
) -> None:
    """The result, block by block of 64 columns. accumulate(at, count): the sums of columns from `at` on; finish(at, count,
    write): calls write(row, i, y, lanes) with the products of columns at + i, some lanes or, at the end, one (0)."""
    _, _, _, _, _, residual, out, _, _ = views_of(views, shape)
    gates: Any = c.stack((shape.rows, BLOCK), jnp.float32) if shape.swiglu else None

    def block(at: Any, count: int) -> None:
        def store(r: int, i: Any, y: Any, lanes: int) -> None:
            if shape.swiglu:
                y = c.silu(gates.load(r, i, lanes=lanes)) * y
            if residual is not None:
                y = y + residual.load(r, at + i, lanes=lanes)
            out.store(y, r, at + i)

        accumulate(at, count)
        if shape.swiglu:
            finish(at, count, lambda r, i, y, lanes: gates.store(y, r, i))
            accumulate(at + shape.out, count)
        finish(at + shape.out if shape.swiglu else at, count, store)

    whole = shape.out // BLOCK
    start, stop = c.share(whole, shape.parts)
    c.loop(start, stop, [], lambda i: block(i * BLOCK, BLOCK))
    if shape.out % BLOCK:
        with c.when(c.part.equals(shape.parts - 1)):
            block(c.index(whole * BLOCK), shape.out % BLOCK)


def plane(words: Any, bits: int, j: int) -> Any:
    """Plane j of words as signed int16."""
    left = 16 - bits * (j + 1)
    return ((words << left) if left else words) >> (16 - bits)
