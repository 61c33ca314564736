"""Rows that wait in a slot's records enter its recurrent state, and its convolution window moves to the front of its
ring, in place: `delta_decode`'s first half alone, for whoever needs states that nothing is missing from.

A block owns one value head of one slot. It runs the very step of `delta_decode` (`delta_rule.step`) as many times as rows
wait, and moves the window of its own channels: v of its head, and q and k of the key head if it is the first that
shares it. A slot with a negative count is neither read nor written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_rule import Layout, step
from pallas_kernels.delta_rule.records import replay


@functools.partial(jax.jit, static_argnames=("width", "interpret"))
def delta_fold(
    recurrent: jax.Array,
    conv: jax.Array,
    records: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    width: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`delta_fold.delta_fold` in one launch; its checks are relied on. ValueError: Dk or Dv that a block cannot hold."""
    slots, value_heads, key_dim, value_dim = recurrent.shape
    step.check_head("delta_fold", key_dim, value_dim)
    key_heads = (conv.shape[2] - value_heads * value_dim) // (2 * key_dim)
    operands = (recurrent, conv, records, start, count)
    return tuple(
        launch.launch(
            functools.partial(
                _fold_kernel, layout=Layout(key_heads, value_heads, key_dim, value_dim), width=width, interpret=interpret
            ),
            name="delta_fold",
            grid=(value_heads, slots),
            in_specs=[launch.whole(x) for x in operands],
            out_specs=(launch.whole(recurrent), launch.whole(conv)),
            out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (recurrent, conv)),
            num_warps=step.WARPS,
            num_stages=1,
            aliases={0: 0, 1: 1},
            interpret=interpret,
        )(*operands)
    )


def _fold_kernel(*refs: Any, layout: Layout, width: int, interpret: bool) -> None:
    """One value head of one slot: its state, and the window of its channels."""
    # The states are read through the outputs, which share their memory: reads and writes keep their order.
    _, _, records, starts, counts, recurrent, conv = refs
    head, slot = pl.program_id(0), pl.program_id(1)
    start, count = launch.load(starts, slot), launch.load(counts, slot)

    # Where nothing waits, S is neither read nor written.
    @pl.when(count > 0)
    def _() -> None:
        state = step.load_state(recurrent, slot, head)
        state = replay(state, records, slot, start, count, head, layout, interpret)
        step.store_state(recurrent, slot, head, state)

    # The window stands behind the raw inputs of the rows that waited: v of this head, and q and k once for all that share them.
    @pl.when(count >= 0)
    def _() -> None:
        move = functools.partial(_move, conv, slot, start + count, width - 1)
        move(2 * layout.keys + head * layout.value_dim, layout.value_dim)

        @pl.when(head % layout.share == 0)
        def _() -> None:
            for at in (0, layout.keys):
                move(at + head // layout.share * layout.key_dim, layout.key_dim)


def _move(conv: Any, slot: Any, at: Any, kept: int, channel: Any, size: int) -> None:
    """Rows at.. of the ring, of `size` channels from `channel` on, become its first `kept`.

    A thread holds the same channels of every row and has read all of them before it writes the first.
    """
    channels = pl.ds(channel, size)
    moved = [launch.load(conv, (slot, jax.lax.rem(at + i, conv.shape[1]), channels)) for i in range(kept)]
    for i, row in enumerate(moved):
        launch.store(conv, (slot, i, channels), row)
