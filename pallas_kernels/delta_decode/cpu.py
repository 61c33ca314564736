"""The delta rule's part of a decode round on a CPU, one call: see kernel.py, whose cut of the work this is.

A part of the work is the value heads that share one key head of one slot: q and k are made once for them. New rows leave
their records first, so that rows that wait and new ones are read from one place by one code (`delta_rule.cpu`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.delta_rule import Layout
from pallas_kernels.delta_rule.cpu import LANES, Block, each_block, unfit
from pallas_kernels.delta_rule.inputs import L2_EPS

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Code, Value, View

__all__ = ["delta_decode", "unfit"]


def delta_decode(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    records: jax.Array,
    start: jax.Array,
    count: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    *,
    rows: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`delta_decode.delta_decode` on a CPU; its checks are relied on. ValueError: Dk or Dv that are no multiples of 16."""
    slots, value_heads, key_dim, value_dim = recurrent.shape
    if reason := unfit("delta_decode", key_dim, value_dim):
        raise ValueError(reason)
    layout = Layout((conv.shape[2] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim)
    arguments = (projected, ab, conv, recurrent, records, start, count, taps, a_log, dt_bias, norm)
    dtypes = tuple(jnp.dtype(a.dtype).name for a in (projected, ab, conv))
    kernel = _kernel(_Shape(slots, rows, layout, taps.shape[2], conv.shape[1], eps, dtypes))
    out, conv, recurrent, records = kernel(*arguments)
    return out, conv, recurrent, records


@dataclasses.dataclass(frozen=True)
class _Shape:
    slots: int
    rows: int
    layout: Layout
    width: int
    ring: int
    eps: float
    dtypes: tuple[str, ...]  # of projected, ab and conv

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        layout, tokens = self.layout, self.slots * self.rows
        heads = layout.value_heads
        shapes = [
            ((tokens, layout.channels + layout.values), self.dtypes[0]),
            ((tokens, 2 * heads), self.dtypes[1]),
            ((self.slots, self.ring, layout.channels), self.dtypes[2]),
            ((self.slots, heads, layout.key_dim, layout.value_dim), "float32"),
            ((self.slots, self.ring, layout.columns), "float32"),
            *(((self.slots,), "int32"),) * 2,
            ((layout.channels, 1, self.width), "float32"),
            *(((heads,), "float32"),) * 2,
            ((layout.value_dim,), "float32"),
        ]
        return [jax.ShapeDtypeStruct(*s) for s in shapes]


@functools.cache
def _kernel(shape: _Shape) -> cpu.Kernel:
    arguments, layout = shape.arguments, shape.layout
    out = jax.ShapeDtypeStruct((shape.slots * shape.rows, layout.values), shape.dtypes[0])

    def build(c: Code, *views: View) -> None:
        projected, ab, _, _, _, start, count, *constants, out, conv, recurrent, records = views
        slot, key_head = c.part // layout.key_heads, c.part % layout.key_heads
        waiting = count.integer(slot)
        with c.when(waiting < 0):
            _clear(c, shape, out, slot, key_head)
        with c.when(waiting >= 0):
            accepted = c.minimum(waiting, shape.ring - shape.rows)
            part = _Part(c, shape, slot, key_head, start.integer(slot), accepted, projected, conv, records, *constants)
            part.run(ab, recurrent, out)

    return cpu.kernel(
        f"delta_decode_{shape.rows}",
        build,
        arguments,
        [out, *arguments[2:5]],
        parts=shape.slots * layout.key_heads,
        aliases={2: 1, 3: 2, 4: 3},
    )


def _clear(c: Code, shape: _Shape, out: View, slot: Value, key_head: Value) -> None:
    size = shape.layout.share * shape.layout.value_dim
    zero = c.constant(0.0, lanes=LANES)
    for row in range(shape.rows):
        c.loop(0, size, [], lambda i, row=row: out.store(zero, slot * shape.rows + row, key_head * size + i), step=LANES)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The value heads of one key head of one slot. What changes in place is read through the results."""

    c: Code
    shape: _Shape
    slot: Value
    key_head: Value
    start: Value
    accepted: Value
    projected: View
    conv: View
    records: View
    taps: View
    a_log: View
    dt_bias: View
    norm: View

    def run(self, ab: View, recurrent: View, out: View) -> None:
        c, shape, layout = self.c, self.shape, self.shape.layout
        queries = c.stack((shape.rows, layout.key_dim), "float32")
        outputs = c.stack((shape.rows, layout.value_dim), "float32")
        records = self.records.part(self.slot)
        column = self.key_head * layout.key_dim
        fresh = [self._ring(row) for row in range(shape.rows)]
        self._convolve(column, layout.key_dim, queries, range(shape.rows), 0)
        self._convolve(layout.keys + column, layout.key_dim, records, fresh, column)
        for row in range(shape.rows):
            self._normalise(queries, row, 0, layout.key_dim**-0.5)
            self._normalise(records, fresh[row], column, 1.0)

        def one_head(i: Value) -> None:
            head = self.key_head * layout.share + i
            values = head * layout.value_dim
            self._convolve(2 * layout.keys + values, layout.value_dim, records, fresh, layout.keys + values)
            for row in range(shape.rows):
                self._gates(ab, row, head)
            recur = functools.partial(self._recur, recurrent=recurrent, queries=queries, outputs=outputs)
            each_block(c, layout, recurrent, records, self.slot, head, recur)
            for row in range(shape.rows):
                self._finish(outputs, out, row, values)

        c.loop(0, layout.share, [], one_head)

    def _ring(self, row: int | Value) -> Value:
        """The ring's row of a new row's record."""
        return (self.start + self.accepted + row) % self.shape.ring

    def _convolve(self, channel: Value, size: int, to: View, rows: Sequence[int | Value], column: int | Value) -> None:
        """SiLU of the causal convolution of `size` channels, rounded as projected is, of every new row into its row of `to`,
        from `column` on; their raw inputs go into the ring."""
        c, shape = self.c, self.shape
        kept = shape.width - 1

        def body(i: Value) -> None:
            own = channel + i
            window = [self.conv.load(self.slot, self._ring(k), own, lanes=LANES) for k in range(kept)]
            window += [self.projected.load(self.slot * shape.rows + row, own, lanes=LANES) for row in range(shape.rows)]
            flat = self.taps.load(own, lanes=LANES * shape.width)
            taps = [flat.take(range(t, LANES * shape.width, shape.width)) for t in range(shape.width)]
            for row in range(shape.rows):
                self.conv.store(window[kept + row], self.slot, self._ring(kept + row), own)
                total = window[row] * taps[0]
                for x, tap in zip(window[row + 1 : row + shape.width], taps[1:], strict=True):
                    total = c.fma(x, tap, total)
                to.store(self._rounded(c.silu(total)), rows[row], column + i)

        c.loop(0, size, [], body, step=LANES)

    def _rounded(self, x: Value) -> Value:
        return self.c.round_bf16(x) if self.shape.dtypes[0] == "bfloat16" else x

    def _normalise(self, x: View, row: int | Value, column: int | Value, scale: float) -> None:
        """L2 norm 1 for key_dim numbers of a row, then times `scale`."""
        c, size = self.c, self.shape.layout.key_dim
        factor = c.rsqrt(_squares(c, x, row, column, size) + L2_EPS)
        c.loop(0, size, [], lambda i: x.store(x.load(row, column + i, lanes=LANES) * factor * scale, row, column + i), step=LANES)

    def _gates(self, ab: View, row: int, head: Value) -> None:
        """exp(-exp(A_log) softplus(a + dt_bias)) and sigmoid(b) into the row's record."""
        c, layout = self.c, self.shape.layout
        token = self.slot * self.shape.rows + row
        a, b = ab.load(token, head) + self.dt_bias.load(head), ab.load(token, layout.value_heads + head)
        decay = c.exp(-(c.exp(self.a_log.load(head)) * c.softplus(a)))
        for i, x in enumerate((decay, c.sigmoid(b))):
            self.records.store(x, self.slot, self._ring(row), layout.keys + layout.values + i * layout.value_heads + head)

    def _recur(self, block: Block, recurrent: View, queries: View, outputs: View) -> None:
        c, rows, ring = self.c, self.shape.rows, self.shape.ring
        known = self.accepted + rows
        seen = block.fetch(recurrent, self.slot, self.start % ring)
        seen = block.replay(seen, self.start, self.accepted, known)
        with c.when(self.accepted > 0):
            block.put_back(recurrent, self.slot)

        def one_row(row: Value, seen: Value) -> list[Value]:
            following = self._ring(c.minimum(row + 1, rows - 1))
            seen, read = block.advance(seen, self._ring(row), following, queries.part(row))
            outputs.store(read, row, block.column)
            return [seen]

        c.loop(0, rows, [seen], one_row)

    def _finish(self, outputs: View, out: View, row: int, values: Value) -> None:
        """Gated RMS norm of a head's output: (x / sqrt(mean x^2 + eps), rounded) * weight * silu(z)."""
        c, layout = self.c, self.shape.layout
        token = self.slot * self.shape.rows + row
        squares = _squares(c, outputs, row, 0, layout.value_dim)
        factor = c.rsqrt(squares / layout.value_dim + self.shape.eps)

        def body(i: Value) -> None:
            x = self._rounded(outputs.load(row, i, lanes=LANES) * factor) * self.norm.load(i, lanes=LANES)
            z = self.projected.load(token, layout.channels + values + i, lanes=LANES)
            out.store(x * c.silu(z), token, values + i)

        c.loop(0, layout.value_dim, [], body, step=LANES)


def _squares(c: Code, x: View, row: int | Value, column: int | Value, size: int) -> Value:
    """Sum of squares of a part of a row: 16 chains, then halves."""

    def body(i: Value, total: Value) -> list[Value]:
        own = x.load(row, column + i, lanes=LANES)
        return [c.fma(own, own, total)]

    return c.loop(0, size, c.zeros(1), body, step=LANES)[0].sum()
