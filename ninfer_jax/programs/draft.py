"""Drafting: the MTP head, realigned with what was really emitted, proposes K tokens greedily; so does a look at what followed the
last tokens before."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.config import PAGE
from ninfer_jax.decoding import most_likely
from ninfer_jax.model import TextModel
from ninfer_jax.programs.lookup import append, look_up
from ninfer_jax.state import State
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.kv_pages import KVPages

# Tokens that have to match before a look-up is taken for better than the MTP head.
BESIDE_MTP = 4


def propose(
    model: TextModel,
    state: State,
    tokens: jax.Array,
    hidden: jax.Array,
    position: jax.Array,
    emitted: jax.Array,
    kv: str,
    valid_ids: int,
) -> State:
    """New drafts for every slot that emitted something.

    tokens int32 `[S, R]`, of which `emitted` int32 `[S]` were output; hidden `[S, R, hidden]`: the target's final-normed
    hidden that each was drawn from; position int32 `[S]`: where row 0 stands. Row r is the MTP slot at position + r:
    it reads (tokens[r], hidden[r]). These rows overwrite what earlier drafts guessed there.
    """
    drafts, width = state.slots.drafts, state.slots.drafts.shape[1]
    if model.has_mtp:
        state, drafts = _by_mtp(model, state, tokens, hidden, position, emitted, kv, valid_ids)
    if state.history is not None:
        filled = position + 1 + emitted
        history = append(state.history, position + 1, tokens, emitted)
        if model.has_mtp:
            found = look_up(history, filled, width, BESIDE_MTP)
            drafts = jnp.where(found < 0, drafts, found)
        else:
            drafts = look_up(history, filled, width)
        state = state._replace(history=history)
    proposed = jnp.where((emitted > 0)[:, None], drafts, state.slots.drafts)
    return state._replace(slots=state.slots._replace(drafts=proposed))


def _by_mtp(
    model: TextModel,
    state: State,
    tokens: jax.Array,
    hidden: jax.Array,
    position: jax.Array,
    emitted: jax.Array,
    kv: str,
    valid_ids: int,
) -> tuple[State, jax.Array]:
    """The state with the MTP layer's keys and values, and drafts int32 `[S, K]`."""
    pool = state.mtp_kv
    assert pool is not None  # there wherever there are drafts
    y, pool = _mtp_rows(model, state, pool, tokens, hidden, position, emitted > 0, kv)
    row = jnp.maximum(emitted - 1, 0)
    y = jnp.take_along_axis(y, row[:, None, None], axis=1)
    drafts = [_most_likely(model, y, valid_ids)]
    for step in range(1, state.slots.drafts.shape[1]):
        # A draft's own output stands in for the hidden that the target has not computed yet.
        y, pool = _mtp_rows(model, state, pool, drafts[-1][:, None], y, position + row + step, emitted > 0, kv)
        drafts.append(_most_likely(model, y, valid_ids))
    return state._replace(mtp_kv=pool), jnp.stack(drafts, axis=1)


def _mtp_rows(
    model: TextModel,
    state: State,
    pool: KVPages,
    tokens: jax.Array,
    hidden: jax.Array,
    position: jax.Array,
    active: jax.Array,
    kv: str,
) -> tuple[jax.Array, KVPages]:
    """The MTP layer over `[S, R]` rows from `position` on -> `[S, R, hidden]` and the pool with their keys and values."""
    slots = state.slots
    count, width = tokens.shape
    rows = position[:, None] + jnp.arange(width)
    turned = (rows + slots.rope_delta[:, None]).reshape(-1)
    cos, sin = model.rotary(jnp.broadcast_to(turned, (3, count * width)))
    filled = jnp.where(active, jnp.minimum(position + width, slots.table.shape[1] * PAGE), 0)
    held = pool

    def attend(projected: jax.Array) -> jax.Array:
        nonlocal held
        where = jnp.where(active[:, None], rows, -1).reshape(-1)
        table = jnp.repeat(slots.table, width, axis=0)
        q, held = model.mtp.layer.self_attn.inputs(projected, cos, sin, held, table, where, kv)
        return decode_attention(q.reshape(count, width, *q.shape[1:]), projected, held, slots.table, rows, filled, format=kv)

    x = model.mtp.stem(model.embed(tokens.reshape(-1)), hidden.reshape(count * width, -1))
    return model.mtp(x, attend).reshape(count, width, -1), held


def _most_likely(model: TextModel, y: jax.Array, valid_ids: int) -> jax.Array:
    if model.has_draft_head:
        return model.reduced_choice(y[:, 0])
    if model.has_candidates(y.shape[0]):
        return model.candidates(y[:, 0], 1, valid_ids)[1][:, 0]
    logits = model.logits(y[:, 0])
    return most_likely(jnp.where(jnp.arange(logits.shape[-1]) < valid_ids, logits, -jnp.inf))
