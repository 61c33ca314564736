"""The verify pass: rows [token, drafts] of all slots through the text tower together.

Each GDN layer first lets the rows enter its state that the round before accepted, and leaves records of its own rows (k, v,
decay, beta, raw convolution input) for the round after: a state is read once and written once a round. `pending` says which
rows wait.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ninfer_jax.config import PAGE
from ninfer_jax.model import TextModel
from ninfer_jax.model.attention import Attention
from ninfer_jax.model.gdn import GatedDeltaNet
from ninfer_jax.state import State
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.delta_decode import delta_decode
from pallas_kernels.elementary import opaque_zero
from pallas_kernels.kv_pages import KVPages

# The core of GDN layer `at` over all rows, from its `projected` and `ab` (see model.gdn) to its outputs.
Core = Callable[[int, GatedDeltaNet, jax.Array, jax.Array], jax.Array]


def verify_rows(model: TextModel, state: State, rows: jax.Array, kv: str) -> tuple[jax.Array, State]:
    """rows int32 `[S, R]`, all in one pass: every weight is read once for the whole round. Returns final-normed hidden
    `[S, R, hidden]` and the state with the rows' keys, values and records; `pending.accept` says how many are to stay."""
    slots, pending = state.slots, state.pending
    # A slot that takes no part keeps what waits in it.
    count = jnp.where(slots.active, pending.count, -1)
    zero, begin = opaque_zero(slots.length), pending.start
    recurrent, conv, records = list(state.recurrent), list(state.conv), list(pending.records)

    def core(at: int, mixer: GatedDeltaNet, projected: jax.Array, ab: jax.Array) -> jax.Array:
        out, conv[at], recurrent[at], records[at] = delta_decode(
            projected,
            ab,
            conv[at],
            recurrent[at],
            records[at],
            begin,
            count,
            *mixer.constants,
            zero,
            rows=rows.shape[1],
            eps=mixer.eps,
        )
        return out

    hidden, pools = rows_through(model, state, rows, kv, core)
    pending = pending._replace(records=tuple(records))
    return hidden, state._replace(kv=pools, recurrent=tuple(recurrent), conv=tuple(conv), pending=pending)


def rows_through(model: TextModel, state: State, rows: jax.Array, kv: str, core: Core) -> tuple[jax.Array, tuple[KVPages, ...]]:
    """rows int32 `[S, R]` through all layers -> final-normed hidden `[S, R, hidden]`, and the pools with their keys and
    values."""
    slots = state.slots
    count, width = rows.shape
    position = slots.length[:, None] + jnp.arange(width)
    where = jnp.where(slots.active[:, None], position, -1).reshape(-1)
    filled = jnp.where(slots.active, jnp.minimum(slots.length + width, slots.table.shape[1] * PAGE), 0)
    table = jnp.repeat(slots.table, width, axis=0)
    turned = (position + slots.rope_delta[:, None]).reshape(-1)
    cos, sin = model.rotary(jnp.broadcast_to(turned, (3, count * width)))
    h = model.embed(rows.reshape(-1))
    pools = list(state.kv)
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

            def recur(
                projected: jax.Array, ab: jax.Array, at: int = linear_at, mixer: GatedDeltaNet = layer.linear_attn
            ) -> jax.Array:
                return core(at, mixer, projected, ab)

            h = layer.linear_attention(h, recur)
            linear_at += 1
    return model.norm(h).reshape(count, width, -1), tuple(pools)
