"""The verify pass: rows [token, drafts] through the text tower, and the fold that makes the accepted ones permanent.

Recurrent states are only read here. Each GDN layer leaves replay records (k, v, decay, beta, raw convolution input), 86 times
smaller than a copy of its state for the 27B, from which `fold` replays as many rows as were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.config import MAX_DRAFT, PAGE
from ninfer_jax.model import TextModel
from ninfer_jax.model.attention import Heads
from ninfer_jax.model.gdn import GatedDeltaNet, Mixed
from ninfer_jax.state import State
from pallas_kernels.attention import KVPages, append, decode_attention
from pallas_kernels.delta_rule import Transitions, decode_delta_rule, fold_transitions
from pallas_kernels.elementary import opaque_zero


class Replay(NamedTuple):
    """Records of one GDN layer (S slots, R rows): transitions `[S, R, ...]`, raw convolution inputs
    `[S, R, channels]`."""

    transitions: Transitions
    raw: jax.Array


class Verified(NamedTuple):
    """logits float32 `[S, R, vocab]`; final-normed hidden `[S, R, hidden]`; the pools with the rows' keys and values;
    one `Replay` a GDN layer."""

    logits: jax.Array
    hidden: jax.Array
    kv: tuple[KVPages, ...]
    replays: tuple[Replay, ...]


def verify_rows_together(model: TextModel, state: State, rows: jax.Array, kv: str) -> Verified:
    """rows int32 `[S, R]`, all in one pass: every weight is read once for the whole round."""
    slots = state.slots
    count, width = rows.shape
    position = slots.length[:, None] + jnp.arange(width)
    where = jnp.where(slots.active[:, None], position, -1).reshape(-1)
    filled = jnp.where(slots.active, jnp.minimum(slots.length + width, slots.table.shape[1] * PAGE), 0)
    table = jnp.repeat(slots.table, width, axis=0)
    turned = (position + slots.rope_delta[:, None]).reshape(-1)
    cos, sin = model.rotary(jnp.broadcast_to(turned, (3, count * width)))
    h = model.embed(rows.reshape(-1))
    zero = opaque_zero(slots.length)
    pools, replays = list(state.kv), []
    attention_at = linear_at = 0
    for layer in model.layers:
        if hasattr(layer, "self_attn"):

            def attend(heads: Heads, at: int = attention_at) -> jax.Array:
                pools[at] = append(pools[at], heads.k, heads.v, table, where, kv)
                q = heads.q.reshape(count, width, *heads.q.shape[1:])
                out = decode_attention(q, pools[at], slots.table, position, filled, kv)
                return out.reshape(heads.q.shape)

            h = layer.attention(h, cos, sin, attend)
            attention_at += 1
        else:

            def recur(mixed: Mixed, at: int = linear_at, mixer: GatedDeltaNet = layer.linear_attn) -> jax.Array:
                out, replay = _recur(mixer, mixed, state.recurrent[at], state.conv[at], width, zero)
                replays.append(replay)
                return out

            h = layer.linear_attention(h, recur)
            linear_at += 1
    hidden = model.norm(h)
    logits = model.logits(hidden).reshape(count, width, -1)
    return Verified(logits, hidden.reshape(count, width, -1), tuple(pools), tuple(replays))


def verify_rows_one_by_one(model: TextModel, state: State, rows: jax.Array, kv: str) -> Verified:
    """The same, one row of one slot after another through one compiled loop body.

    For a CPU. XLA's CPU compiler sums, fuses and rounds in ways that depend on array shapes, so a row verified beside
    three drafts would differ in its last bits from the same row decoded alone, and a near tie could flip. Here both are
    the same code on the same shapes. Nothing is lost: at a handful of rows a CPU is fastest with matrix-vector products
    anyway. Empty slots cost nothing. Buffers have room for the most rows an engine may have, whatever this one's K is: the
    loop is then the same program for every K, not just the same source.
    """
    count, width = rows.shape
    rows = jnp.pad(rows, ((0, 0), (0, MAX_DRAFT + 1 - width)))
    alone = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), _slot_arrays(state))
    shapes = jax.eval_shape(lambda a: verify_rows_together(model, _with_slot(state, a), rows[:1, :1], kv), alone)
    room = jax.tree.map(lambda x: jnp.zeros((count, MAX_DRAFT + 1, *x.shape[2:]), x.dtype), shapes._replace(kv=()))

    def one_slot(slot: jax.Array, carry: tuple) -> tuple:
        mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), _slot_arrays(state))
        zero = opaque_zero(state.slots.length)

        def one_row(row: jax.Array, carry: tuple) -> tuple:
            out, pools, (slots, recurrent, conv), before = carry
            # The row before enters the states only now, because the last one never has to: plain decoding folds nothing
            # here. The count is data, so that this is the loop that `fold` runs, not an unrolled cousin of it.
            once = jnp.minimum(row, 1)[None]
            recurrent = tuple(fold_transitions(s, t, once, zero) for s, t in zip(recurrent, before, strict=True))
            token = jax.lax.dynamic_slice(rows, (slot, row), (1, 1))
            here = _with_slot(state._replace(kv=pools), (slots, recurrent, conv))
            done = verify_rows_together(model, here, token, kv)
            out = jax.tree.map(
                lambda to, x: jax.lax.dynamic_update_slice(to, x, (slot, row, *(0,) * (x.ndim - 2))), out, done._replace(kv=())
            )
            conv = tuple(jnp.concatenate([c, r.raw], axis=1)[:, 1:] for c, r in zip(conv, done.replays, strict=True))
            mine = (slots._replace(length=slots.length + 1), recurrent, conv)
            return out, done.kv, mine, tuple(r.transitions for r in done.replays)

        # The bound is data, so the loop stays a loop at one row too: plain decoding runs this very body.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tuple(r.transitions for r in shapes.replays))
        width_here = jnp.where(mine[0].active[0], width, 0)
        out, pools, *_ = jax.lax.fori_loop(0, width_here, one_row, (*carry, mine, nothing))
        return out, pools

    out, pools = jax.lax.fori_loop(0, count, one_slot, (room, state.kv))
    return out._replace(kv=pools, logits=out.logits[:, :width], hidden=out.hidden[:, :width])


def fold(state: State, replays: tuple[Replay, ...], emitted: jax.Array) -> State:
    """Recurrent and convolution states after the first `emitted[slot]` rows, int32 `[S]`."""
    zero = opaque_zero(state.slots.length)

    def one_slot(slot: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), (states, replays, emitted))
        kept = tuple(fold_transitions(s, r.transitions, mine[2], zero) for s, r in zip(*mine[:2], strict=True))
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 0), states, kept)

    recurrent = jax.lax.fori_loop(0, emitted.shape[0], one_slot, state.recurrent)
    conv = []
    for kept, replay in zip(state.conv, replays, strict=True):
        window = jnp.concatenate([kept, replay.raw], axis=1)
        columns = emitted[:, None] + jnp.arange(kept.shape[1])
        conv.append(jnp.take_along_axis(window, columns[..., None], axis=1))
    return state._replace(recurrent=recurrent, conv=tuple(conv))


def _recur(
    mixer: GatedDeltaNet, mixed: Mixed, recurrent: jax.Array, conv: jax.Array, width: int, zero: jax.Array
) -> tuple[jax.Array, Replay]:
    raw, g, beta = (x.reshape(-1, width, *x.shape[1:]) for x in (mixed.raw, mixed.g, mixed.beta))
    window = jnp.concatenate([conv, raw], axis=1)
    q, k, v = mixer.convolve(window)
    transitions = Transitions(k, v, jnp.exp(g), beta)
    out = decode_delta_rule(recurrent, q, transitions, zero)
    return out.reshape(-1, *out.shape[2:]), Replay(transitions, raw)


def _slot_arrays(state: State) -> tuple:
    """What a verify pass reads of each slot; every leaf has the slot axis first."""
    return state.slots, state.recurrent, state.conv


def _with_slot(state: State, arrays: tuple) -> State:
    slots, recurrent, conv = arrays
    return state._replace(slots=slots, recurrent=recurrent, conv=conv)
