"""`prefill`: one chunk of one slot's prompt through the whole model, into its pages and states."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.model import TextModel
from ninfer_jax.model.attention import Heads
from ninfer_jax.model.gdn import GatedDeltaNet, Mixed
from ninfer_jax.state import State
from pallas_kernels.attention import KVPages, append, prefill_attention
from pallas_kernels.delta_rule import chunked_delta_rule


class PrefillInputs(NamedTuple):
    """One chunk: slot int32 scalar; tokens int32 `[chunk]`, the first `count` valid; next_tokens int32 `[chunk]`, the
    token after each (-1 where not known yet: the prompt's last); positions int32 `[3, chunk]` for RoPE."""

    slot: jax.Array
    tokens: jax.Array
    next_tokens: jax.Array
    count: jax.Array
    positions: jax.Array


def prefill_chunk(model: TextModel, state: State, inputs: PrefillInputs, kv: str) -> tuple[State, jax.Array]:
    """Appends the chunk to the slot; returns the state and the final-normed hidden `[chunk, hidden]` of its rows."""
    slot, count = inputs.slot, inputs.count
    chunk = inputs.tokens.shape[0]
    start, table = state.slots.length[slot], state.slots.table[slot]
    valid = jnp.arange(chunk) < count
    where = jnp.where(valid, start + jnp.arange(chunk), -1)
    cos, sin = model.rotary(inputs.positions)
    h = model.embed(inputs.tokens)
    kv_pools, recurrent, conv = list(state.kv), list(state.recurrent), list(state.conv)
    attention_at = linear_at = 0
    for layer in model.layers:
        if hasattr(layer, "self_attn"):

            def attend(heads: Heads, at: int = attention_at) -> jax.Array:
                kv_pools[at] = append(kv_pools[at], heads.k, heads.v, table, where, kv)
                return prefill_attention(heads.q, kv_pools[at], table, start, count, kv)

            h = layer.attention(h, cos, sin, attend)
            attention_at += 1
        else:

            def recur(mixed: Mixed, at: int = linear_at, mixer: GatedDeltaNet = layer.linear_attn) -> jax.Array:
                out, recurrent[at], conv[at] = _recur(mixer, mixed, recurrent[at], conv[at], slot, valid, count)
                return out

            h = layer.linear_attention(h, recur)
            linear_at += 1
    hidden = model.norm(h)
    state = state._replace(kv=tuple(kv_pools), recurrent=tuple(recurrent), conv=tuple(conv))
    if model.has_mtp:
        state = state._replace(mtp_kv=_fill_mtp(model, state.mtp_kv, hidden, inputs, table, where, cos, sin, kv))
    return _advance(state, inputs, hidden, valid), hidden


def _recur(
    mixer: GatedDeltaNet, mixed: Mixed, recurrent: jax.Array, conv: jax.Array, slot: jax.Array, valid: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    window = jnp.concatenate([conv[slot], mixed.raw])
    q, k, v = mixer.convolve(window)
    # A token with g = beta = 0 is no token to the delta rule; that is how the padding of the last chunk is passed.
    g, beta = (jnp.where(valid[:, None], x, 0.0) for x in (mixed.g, mixed.beta))
    out, new = chunked_delta_rule(recurrent[slot], q, k, v, g, beta)
    kept = jax.lax.dynamic_slice_in_dim(window, count, conv.shape[1], axis=0)
    return out, recurrent.at[slot].set(new), conv.at[slot].set(kept)


def _fill_mtp(
    model: TextModel, pool: KVPages, hidden: jax.Array, inputs: PrefillInputs,
    table: jax.Array, where: jax.Array, cos: jax.Array, sin: jax.Array, kv: str,
) -> KVPages:  # fmt: skip
    """Keys and values of the MTP slots whose next token is known. A prompt needs nothing else of that layer."""
    known = inputs.next_tokens >= 0
    x = model.mtp.stem(model.embed(jnp.where(known, inputs.next_tokens, 0)), hidden)
    k, v = model.mtp.keys_values(x, cos, sin)
    return append(pool, k, v, table, jnp.where(known, where, -1), kv)


def _advance(state: State, inputs: PrefillInputs, hidden: jax.Array, valid: jax.Array) -> State:
    slot = inputs.slot
    slots = state.slots._replace(
        length=state.slots.length.at[slot].add(inputs.count),
        hidden=state.slots.hidden.at[slot].set(hidden[jnp.maximum(inputs.count - 1, 0)]),
    )
    # Padding writes to token 0 what is there already.
    seen = state.sampling.in_prompt[slot]
    marks = jnp.zeros_like(seen).at[inputs.tokens].max(valid)
    sampling = state.sampling._replace(in_prompt=state.sampling.in_prompt.at[slot].set(seen | marks))
    return state._replace(slots=slots, sampling=sampling)
