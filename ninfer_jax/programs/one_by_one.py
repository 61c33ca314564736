"""The verify pass and its fold as a CPU wants them: one row of one slot after another through one compiled loop body.

XLA's CPU compiler sums, fuses and rounds in ways that depend on array shapes, so a row verified beside three drafts would
differ in its last bits from the same row decoded alone, and a near tie could flip. Here both are the same code on the
same shapes. Nothing is lost: at a handful of rows a CPU is fastest with matrix-vector products anyway. Empty slots cost
nothing. Buffers have room for the most rows an engine may have, whatever this one's K is: the loop is then the same
program for every K, not just the same source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.config import MAX_DRAFT
from ninfer_jax.model import TextModel
from ninfer_jax.model.gdn import GatedDeltaNet
from ninfer_jax.programs.verify import rows_through
from ninfer_jax.state import State
from pallas_kernels.delta_decode import decode_rows
from pallas_kernels.delta_fold import shift_window
from pallas_kernels.delta_rule import Transitions, replay_rows
from pallas_kernels.elementary import opaque_zero
from pallas_kernels.kv_pages import KVPages


class Replay(NamedTuple):
    """Records of one GDN layer (S slots, R rows): transitions `[S, R, ...]`, and its projections `[S * R, ...]`, whose
    leading columns are the raw convolution inputs."""

    transitions: Transitions
    projected: jax.Array


class Verified(NamedTuple):
    """Final-normed hidden `[S, R, hidden]`; the pools with the rows' keys and values; one `Replay` a GDN layer."""

    hidden: jax.Array
    kv: tuple[KVPages, ...]
    replays: tuple[Replay, ...]


class Rows(NamedTuple):
    """Results of rows as they come: logits `[S, R, vocab]`; hidden `[S, most rows, hidden]`; records of all GDN layers
    together, one buffer to clear instead of one a layer: transitions and raw convolution inputs `[layers, S, most rows,
    ...]`, None without such layers."""

    logits: jax.Array
    hidden: jax.Array
    records: tuple[Transitions, jax.Array] | None

    def with_row(self, slot: jax.Array, row: jax.Array, done: Verified, logits: jax.Array) -> Rows:
        """Results with those of one row of one slot added; logits `[1, 1, vocab]`."""

        def write(to: jax.Array, x: jax.Array, *layer: int) -> jax.Array:
            start = (*layer, slot, row)
            x = jnp.expand_dims(x, tuple(range(len(layer))))
            return jax.lax.dynamic_update_slice(to, x, (*start, *(0,) * (to.ndim - len(start))))

        records = self.records
        for layer, replay in enumerate(done.replays):
            assert records is not None
            fresh = replay.transitions, raw_inputs(replay, records[1].shape[-1])
            records = jax.tree.map(lambda to, x, layer=layer: write(to, x, layer), records, fresh)
        return Rows(write(self.logits, logits), write(self.hidden, done.hidden), records)

    def transitions(self, layer: int, slot: jax.Array, row: jax.Array) -> Transitions:
        """One row's records `[1, ...]` of one layer."""

        def read(x: jax.Array) -> jax.Array:
            found = jax.lax.dynamic_slice(x, (layer, slot, row, *(0,) * (x.ndim - 3)), (1, 1, 1, *x.shape[3:]))
            return found.reshape(1, *x.shape[3:])

        assert self.records is not None  # asked for by a layer that has them
        return jax.tree.map(read, self.records[0])


def verify_rows(model: TextModel, state: State, rows: jax.Array, kv: str) -> Verified:
    """rows int32 `[S, R]` after the states as they are, which are only read; the loop below calls it for one row."""
    zero = opaque_zero(state.slots.length)
    replays = []

    def core(at: int, mixer: GatedDeltaNet, projected: jax.Array, ab: jax.Array) -> jax.Array:
        states = state.conv[at], state.recurrent[at]
        out, transitions = decode_rows(projected, ab, *states, *mixer.constants, zero, rows=rows.shape[1], eps=mixer.eps)
        replays.append(Replay(transitions, projected))
        return out

    hidden, pools = rows_through(model, state, rows, kv, core)
    return Verified(hidden, pools, tuple(replays))


def verify_rows_one_by_one(
    model: TextModel, state: State, rows: jax.Array, kv: str
) -> tuple[Rows, tuple[KVPages, ...], tuple[jax.Array, ...]]:
    """rows int32 `[S, R]` -> their results, the pools with their keys and values, and the recurrent states: with the
    values that they had, but if R = 1 in the buffers that the loop used, which spares plain decoding a copy of them."""
    count, width = rows.shape
    rows = jnp.pad(rows, ((0, 0), (0, MAX_DRAFT + 1 - width)))
    mine, put_back = _one_slot_of(count)
    alone = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), _slot_arrays(state))
    shapes = jax.eval_shape(lambda a: verify_rows(model, _with_slot(state, a), rows[:1, :1], kv), alone)
    zero = opaque_zero(state.slots.length)

    def one_slot(slot: jax.Array, carry: tuple) -> tuple:
        out, pools, recurrent = carry
        here = jax.tree.map(lambda x: mine(x, slot), _slot_arrays(state._replace(recurrent=recurrent)))

        def one_row(row: jax.Array, carry: tuple) -> tuple:
            out, pools, (slots, recurrent, conv) = carry
            # The row before enters the states only now, because the last one never has to: plain decoding folds nothing here.
            recurrent = _replay(recurrent, out, slot, jnp.maximum(row - 1, 0), row, zero)
            token = jax.lax.dynamic_slice(rows, (slot, row), (1, 1))
            done = verify_rows(model, _with_slot(state._replace(kv=pools), (slots, recurrent, conv)), token, kv)
            raw = [raw_inputs(replay, c.shape[-1]) for c, replay in zip(conv, done.replays, strict=True)]
            conv = tuple(jnp.concatenate([c, r], axis=1)[:, 1:] for c, r in zip(conv, raw, strict=True))
            after = (slots._replace(length=slots.length + 1), recurrent, conv)
            return out.with_row(slot, row, done, model.logits(done.hidden[0])[None]), done.kv, after

        # The bound is data, so the loop stays a loop at one row too: plain decoding runs this very body.
        width_here = jnp.where(here[0].active[0], width, 0)
        out, pools, (_, stepped, _) = jax.lax.fori_loop(0, width_here, one_row, (out, pools, here))
        return out, pools, put_back(recurrent, stepped, slot) if width == 1 else recurrent

    start = (_room(shapes, state.conv, count, width, model.config.vocab_size), state.kv, state.recurrent)
    return one_slot(jnp.int32(0), start) if count == 1 else jax.lax.fori_loop(0, count, one_slot, start)


def fold_rows_one_by_one(state: State, out: Rows, emitted: jax.Array) -> State:
    """Recurrent and convolution states after the first `emitted[slot]` rows, int32 `[S]`."""
    zero = opaque_zero(state.slots.length)
    count = emitted.shape[0]
    mine, put_back = _one_slot_of(count)

    def one_slot(slot: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        own = tuple(mine(s, slot) for s in states)
        return put_back(states, _replay(own, out, slot, jnp.int32(0), emitted[slot], zero), slot)

    recurrent = one_slot(jnp.int32(0), state.recurrent) if count == 1 else jax.lax.fori_loop(0, count, one_slot, state.recurrent)
    conv = state.conv
    if out.records is not None:
        conv = tuple(shift_window(c, out.records[1][layer], emitted) for layer, c in enumerate(conv))
    return state._replace(recurrent=recurrent, conv=conv)


def _replay(
    states: tuple[jax.Array, ...], out: Rows, slot: jax.Array, first: jax.Array, last: jax.Array, zero: jax.Array
) -> tuple[jax.Array, ...]:
    """Every layer's state `[1, ...]` after the recorded rows first..last-1 of a slot. The bounds are data, so that this is
    the same loop wherever it stands."""
    return tuple(replay_rows(s, partial(out.transitions, layer, slot), first, last, zero) for layer, s in enumerate(states))


def raw_inputs(replay: Replay, channels: int) -> jax.Array:
    """The raw convolution inputs of one row, `[1, 1, channels]`."""
    return replay.projected[:, None, :channels]


def _room(shapes: Verified, conv: tuple[jax.Array, ...], count: int, width: int, vocab: int) -> Rows:
    """Zeros to be filled. Logits come from a product of their own: the size of their buffer decides no bit of them."""
    most = MAX_DRAFT + 1
    records = None
    if conv:
        lead = (len(conv), count, most)
        records = (
            jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape[2:]), x.dtype), shapes.replays[0].transitions),
            jnp.zeros((*lead, conv[0].shape[-1]), conv[0].dtype),
        )
    return Rows(
        jnp.zeros((count, width, vocab), jnp.float32),
        jnp.zeros((count, most, *shapes.hidden.shape[2:]), shapes.hidden.dtype),
        records,
    )


def _one_slot_of(count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two functions: one slot's part `[1, ...]` of an array `[count, ...]`, and a tree with such parts put back."""
    if count == 1:
        # Not even a slice: it would copy the state.
        return lambda x, slot: x, lambda whole, part, slot: part

    def put_back(whole: Any, part: Any, slot: jax.Array) -> Any:
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 0), whole, part)

    return lambda x, slot: jax.lax.dynamic_slice_in_dim(x, slot, 1), put_back


def _slot_arrays(state: State) -> tuple:
    """The arrays that a verify pass reads of each slot; every leaf has the slot axis first."""
    return state.slots, state.recurrent, state.conv


def _with_slot(state: State, arrays: tuple) -> State:
    slots, recurrent, conv = arrays
    return state._replace(slots=slots, recurrent=recurrent, conv=conv)
