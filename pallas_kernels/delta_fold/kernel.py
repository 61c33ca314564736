"""Accepted rows enter the recurrent and the convolution state, in place: the replay that follows a verify pass.

A block owns one value head of one slot. It runs the very step of `delta_decode` (`delta_rule.step`) as many times as
rows were accepted, and moves the convolution window of its own channels: v of its head, and q and k of the key head
if it is the first that shares it. A slot without accepted rows is neither read nor written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_rule import Transitions, step


@functools.partial(jax.jit, static_argnames=("interpret",))
def delta_fold(
    recurrent: jax.Array,
    conv: jax.Array,
    transitions: Transitions,
    projected: jax.Array,
    accepted: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` and `conv` after the first `accepted[slot]` recorded rows; donate both, and they change in place.

    recurrent float32 `[slots, Hv, Dk, Dv]`; conv bf16 `[slots, width - 1, channels]`; transitions as `delta_decode`
    returned them for `rows` rows a slot; projected bf16 `[slots * rows, at least channels]`: that call's, of which the
    raw convolution inputs are read; accepted int32 `[slots]`, taken as 0 below 0 and as `rows` above.
    ValueError: Dk or Dv that a block cannot hold.
    """
    slots, value_heads, key_dim, value_dim = recurrent.shape
    step.check_head("delta_fold", key_dim, value_dim)
    operands = (recurrent, conv, *transitions, projected, accepted)
    return tuple(
        launch.launch(
            functools.partial(_fold_kernel, interpret=interpret),
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


def _fold_kernel(*refs: Any, interpret: bool) -> None:
    # The states are read through the outputs, which share their memory: reads and writes keep their order.
    _, _, *records, projected, accepted, recurrent, conv = refs
    k_ref, v_ref, *_ = records
    rows, key_heads, key_dim = k_ref.shape[1:]
    value_heads, value_dim = v_ref.shape[2:]
    share = value_heads // key_heads
    head, slot = pl.program_id(0), pl.program_id(1)
    key_head = head // share
    count = jnp.clip(launch.load(accepted, slot), 0, rows)

    @pl.when(count > 0)
    def _() -> None:
        def replay(row: Any, carry: tuple) -> tuple:
            state, (k, v, decay, beta) = carry
            # The next row's record arrives while this one is folded.
            following = _load_record(records, slot, jnp.minimum(row + 1, rows - 1), head, key_head)
            k = step.columns(k, value_dim)
            u = step.update(state, k, v, decay, beta, interpret)
            return step.advance(state, k, u, decay, interpret), following

        start = step.load_state(recurrent, slot, head), _load_record(records, slot, 0, head, key_head)
        state, _ = jax.lax.fori_loop(0, count, replay, start)
        step.store_state(recurrent, slot, head, state)
        keys = key_heads * key_dim
        _shift(conv, projected, slot, count, rows, 2 * keys + head * value_dim, value_dim)

        @pl.when(head % share == 0)
        def _() -> None:
            for at in (key_head * key_dim, keys + key_head * key_dim):
                _shift(conv, projected, slot, count, rows, at, key_dim)


def _load_record(records: Any, slot: Any, row: Any, head: Any, key_head: Any) -> tuple[jax.Array, ...]:
    k_ref, v_ref, decay_ref, beta_ref = records
    return (
        launch.load(k_ref, (slot, row, key_head, pl.ds(0, k_ref.shape[3]))),
        launch.load(v_ref, (slot, row, head, pl.ds(0, v_ref.shape[3]))),
        launch.load(decay_ref, (slot, row, head)),
        launch.load(beta_ref, (slot, row, head)),
    )


def _shift(conv: Any, projected: Any, slot: Any, count: Any, rows: int, at: Any, size: int) -> None:
    """The window of channels at..at+size moved on by `count` rows: its rows are those of [conv ; projected] from there.

    A thread holds the same channels of every row and has read all of them before it writes the first.
    """
    kept = conv.shape[1]
    channels = pl.ds(at, size)
    moved = []
    for i in range(kept):
        source = count + i
        old = jnp.broadcast_to(source < kept, (size,))
        before = launch.load(conv, (slot, jnp.minimum(source, kept - 1), channels), old)
        fresh = launch.load(projected, (slot * rows + jnp.maximum(source - kept, 0), channels), ~old)
        moved.append(jnp.where(old, before, fresh))
    for i, row in enumerate(moved):
        launch.store(conv, (slot, i, channels), row)
