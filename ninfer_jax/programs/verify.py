"""The verify pass as a GPU wants it: rows [token, drafts] of all slots through the text tower together, and the fold that
makes the accepted ones permanent.

Recurrent states are only read here. Each GDN layer leaves replay records (k, v, decay, beta, raw convolution input), 86 times
smaller than a copy of its state for the 27B, from which the fold replays as many rows as were accepted. `one_by_one` is
the form for a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.config import PAGE
from ninfer_jax.model import TextModel
from ninfer_jax.model.attention import Attention
from ninfer_jax.model.gdn import GatedDeltaNet
from ninfer_jax.state import State
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.delta_decode import delta_decode
from pallas_kernels.delta_fold import delta_fold
from pallas_kernels.delta_rule import Transitions
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

            def attend(projected: jax.Array, at: int = attention_at, layer: Attention = layer.self_attn) -> jax.Array:
                q, pools[at] = layer.inputs(projected, cos, sin, pools[at], table, where, kv)
                q = q.reshape(count, width, *q.shape[1:])
                return decode_attention(q, projected, pools[at], slots.table, position, filled, format=kv)

            h = layer.attention(h, attend)
            attention_at += 1
        else:

            def recur(projected: jax.Array, ab: jax.Array, at: int = linear_at, mixer: GatedDeltaNet = layer.linear_attn) -> jax.Array:
                states = state.conv[at], state.recurrent[at]
                out, transitions = delta_decode(projected, ab, *states, *mixer.constants, zero, rows=width, eps=mixer.eps)
                replays.append(Replay(transitions, projected))
                return out

            h = layer.linear_attention(h, recur)
            linear_at += 1
    return Verified(model.norm(h).reshape(count, width, -1), tuple(pools), tuple(replays))


def fold_rows_together(state: State, replays: tuple[Replay, ...], emitted: jax.Array) -> State:
    """Recurrent and convolution states after the first `emitted[slot]` rows, int32 `[S]`."""
    zero = opaque_zero(state.slots.length)
    recurrent, conv = list(state.recurrent), list(state.conv)
    for at, replay in enumerate(replays):
        recurrent[at], conv[at] = delta_fold(
            recurrent[at], conv[at], replay.transitions, replay.projected, emitted, zero
        )
    return state._replace(recurrent=tuple(recurrent), conv=tuple(conv))
