"""`prefill`: one chunk of one slot's prompt through the whole model, into its pages and states."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.model import TextModel
from ninfer_jax.model.attention import Attention
from ninfer_jax.model.gdn import GatedDeltaNet
from ninfer_jax.programs.pending import settle
from ninfer_jax.state import State
from pallas_kernels.delta_prefill import delta_prefill
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.prefill_attention import prefill_attention


class PrefillInputs(NamedTuple):
    """One chunk: slot int32 scalar; tokens int32 `[chunk]`, the first `count` valid; positions int32 `[3, chunk + 1]` for RoPE, the
    first that of the token before the chunk."""

    slot: jax.Array
    tokens: jax.Array
    count: jax.Array
    positions: jax.Array


def prefill_chunk(model: TextModel, state: State, inputs: PrefillInputs, kv: str) -> tuple[State, jax.Array]:
    """Appends the chunk to the slot; returns the state and the final-normed hidden `[chunk, hidden]` of its rows."""
    state = settle(state, model.config.conv_width, inputs.slot)
    slot, count = inputs.slot, inputs.count
    chunk = inputs.tokens.shape[0]
    start, table = state.slots.length[slot], state.slots.table[slot]
    valid = jnp.arange(chunk) < count
    where = jnp.where(valid, start + jnp.arange(chunk), -1)
    cos, sin = model.rotary(inputs.positions[:, 1:])
    embedded = model.embed(inputs.tokens)
    kv_pools, recurrent, conv = list(state.kv), list(state.recurrent), list(state.conv)

    def attend(at: int, mixer: Attention, projected: jax.Array) -> jax.Array:
        q, kv_pools[at] = mixer.inputs(projected, cos, sin, kv_pools[at], table, where, kv)
        return prefill_attention(q, projected, kv_pools[at], table, start, count, format=kv)

    def recur(at: int, mixer: GatedDeltaNet, projected: jax.Array, ab: jax.Array) -> jax.Array:
        out, conv[at], recurrent[at] = delta_prefill(
            projected, ab, conv[at], recurrent[at], *mixer.constants, slot, count, eps=mixer.eps
        )
        return out

    hidden = model.run(embedded, attend, recur)
    state = state._replace(kv=tuple(kv_pools), recurrent=tuple(recurrent), conv=tuple(conv))
    if model.has_mtp:
        assert state.mtp_kv is not None  # they come together
        state = state._replace(mtp_kv=_fill_mtp(model, state, inputs, embedded, hidden, kv))
    return _advance(state, inputs, hidden, valid), hidden


def _fill_mtp(model: TextModel, state: State, inputs: PrefillInputs, embedded: jax.Array, hidden: jax.Array, kv: str) -> KVPages:
    """The MTP layer's pages with the entries of the token before the chunk and of all of the chunk's but the last, whose next
    token comes later. An entry is made of a token's hidden and of the token after it; a prompt needs nothing else of that layer.
    """
    slot, slots, pool = inputs.slot, state.slots, state.mtp_kv
    assert pool is not None  # there wherever there are drafts
    row = jnp.arange(len(hidden))
    # The entry of the token before is there already where a round has written it, and at the start there is no such token.
    known = (row < inputs.count) & ((row > 0) | slots.linked[slot])
    where = jnp.where(known, slots.length[slot] - 1 + row, -1)
    before = jnp.concatenate([slots.hidden[slot][None], hidden[:-1]])
    cos, sin = model.rotary(inputs.positions[:, :-1])
    projected = model.mtp.project(model.mtp.stem(embedded, before))
    return model.mtp.layer.self_attn.inputs(projected, cos, sin, pool, slots.table[slot], where, kv)[1]


def _advance(state: State, inputs: PrefillInputs, hidden: jax.Array, valid: jax.Array) -> State:
    slot, history = inputs.slot, state.history
    start = state.slots.length[slot]
    slots = state.slots._replace(
        length=state.slots.length.at[slot].add(inputs.count),
        hidden=state.slots.hidden.at[slot].set(hidden[jnp.maximum(inputs.count - 1, 0)]),
        linked=state.slots.linked.at[slot].set(True),
    )
    # Padding writes to token 0 what is there already.
    seen = state.sampling.in_prompt[slot]
    marks = jnp.zeros_like(seen).at[inputs.tokens].max(valid)
    sampling = state.sampling._replace(in_prompt=state.sampling.in_prompt.at[slot].set(seen | marks))
    state = state._replace(slots=slots, sampling=sampling)
    if history is None:
        return state
    here = jnp.where(valid, start + jnp.arange(len(valid)), history.shape[1])
    return state._replace(history=history.at[slot, here].set(inputs.tokens, mode="drop"))
