"""The verify pass: rows [token, drafts] of all slots through the text tower together.

Each GDN layer first lets the rows enter its state that the round before accepted, and leaves records of its own rows (k, v,
decay, beta, raw convolution input) for the round after: a state is read once and written once a round. `pending` says which
rows wait.
"""

from __future__ import annotations

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


def verify_rows(model: TextModel, state: State, rows: jax.Array, kv: str) -> tuple[jax.Array, State]:
    """rows int32 `[S, R]`, all in one pass: every weight is read once for the whole round. Returns final-normed hidden
    `[S, R, hidden]` and the state with the rows' keys, values and records; `pending.accept` says how many are to stay."""
    slots, pending = state.slots, state.pending
    count, width = rows.shape
    position = slots.length[:, None] + jnp.arange(width)
    where = jnp.where(slots.active[:, None], position, -1).reshape(-1)
    filled = jnp.where(slots.active, jnp.minimum(slots.length + width, slots.table.shape[1] * PAGE), 0)
    table = jnp.repeat(slots.table, width, axis=0)
    turned = (position + slots.rope_delta[:, None]).reshape(-1)
    cos, sin = model.rotary(jnp.broadcast_to(turned, (3, count * width)))
    # A slot that takes no part keeps what waits in it.
    waiting = jnp.where(slots.active, pending.count, -1)
    zero, begin = opaque_zero(slots.length), pending.start
    pools, recurrent, conv, records = list(state.kv), list(state.recurrent), list(state.conv), list(pending.records)

    def attend(at: int, mixer: Attention, projected: jax.Array) -> jax.Array:
        q, pools[at] = mixer.inputs(projected, cos, sin, pools[at], table, where, kv)
        q = q.reshape(count, width, *q.shape[1:])
        return decode_attention(q, projected, pools[at], slots.table, position, filled, format=kv)

    def recur(at: int, mixer: GatedDeltaNet, projected: jax.Array, ab: jax.Array) -> jax.Array:
        out, conv[at], recurrent[at], records[at] = delta_decode(
            projected, ab, conv[at], recurrent[at], records[at], begin, waiting, *mixer.constants, zero, rows=width, eps=mixer.eps
        )
        return out

    hidden = model.run(model.embed(rows.reshape(-1)), attend, recur).reshape(count, width, -1)
    pending = pending._replace(records=tuple(records))
    state = state._replace(kv=tuple(pools), recurrent=tuple(recurrent), conv=tuple(conv), pending=pending)
    return hidden, state
