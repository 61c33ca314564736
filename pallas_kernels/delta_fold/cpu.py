"""Settling on a CPU: the waiting rows enter the states by the code of a decode round, the window moves to the ring's front."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax

from pallas_kernels import cpu
from pallas_kernels.delta_rule import Layout
from pallas_kernels.delta_rule.cpu import LANES, Block, each_block, unfit

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Code, Value, View

__all__ = ["delta_fold", "unfit"]


def delta_fold(
    recurrent: jax.Array, conv: jax.Array, records: jax.Array, start: jax.Array, count: jax.Array, *, width: int
) -> tuple[jax.Array, jax.Array]:
    """`delta_fold.delta_fold` on a CPU; its checks are relied on. ValueError: Dk or Dv that are no multiples of 16."""
    slots, value_heads, key_dim, value_dim = recurrent.shape
    if reason := unfit("delta_fold", key_dim, value_dim):
        raise ValueError(reason)
    layout = Layout((conv.shape[2] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim)
    kernel = _kernel(slots, layout, conv.shape[1], width, conv.dtype)
    recurrent, conv = kernel(recurrent, conv, records, start, count)
    return recurrent, conv


@functools.cache
def _kernel(slots: int, layout: Layout, ring: int, width: int, dtype) -> cpu.Kernel:
    struct = jax.ShapeDtypeStruct
    arguments = [
        struct((slots, layout.value_heads, layout.key_dim, layout.value_dim), "float32"),
        struct((slots, ring, layout.channels), dtype),
        struct((slots, ring, layout.columns), "float32"),
        struct((slots,), "int32"),
        struct((slots,), "int32"),
    ]

    def build(c: Code, _s: View, _c: View, records: View, start: View, count: View, recurrent: View, conv: View) -> None:
        slot, key_head = c.part // layout.key_heads, c.part % layout.key_heads
        first, waiting = start.integer(slot), count.integer(slot)

        def replay(block: Block) -> None:
            seen = block.fetch(recurrent, slot, first % ring)
            block.replay(seen, first, waiting, waiting)
            block.put_back(recurrent, slot)

        def one_head(i: Value) -> None:
            head = key_head * layout.share + i
            each_block(c, layout, recurrent, records.part(slot), slot, head, replay)

        with c.when(waiting > 0):
            c.loop(0, layout.share, [], one_head)
        with c.when(waiting >= 0):
            move = functools.partial(_move, c, conv, slot, first + waiting, width - 1)
            for at in (0, layout.keys):
                move(at + key_head * layout.key_dim, layout.key_dim)
            values = layout.share * layout.value_dim
            move(2 * layout.keys + key_head * values, values)

    return cpu.kernel("delta_fold", build, arguments, arguments[:2], parts=slots * layout.key_heads, aliases={0: 0, 1: 1})


def _move(c: Code, conv: View, slot: Value, at: Value, kept: int, channel: Value, size: int) -> None:
    """Rows at.. of the ring, of `size` channels from `channel` on, become its first `kept`: all read before one is written."""

    def body(i: Value) -> None:
        moved = [conv.load(slot, (at + row) % conv.shape[1], channel + i, lanes=LANES) for row in range(kept)]
        for row, x in enumerate(moved):
            conv.store(x, slot, row, channel + i)

    c.loop(0, size, [], body, step=LANES)
