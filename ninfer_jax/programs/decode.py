"""`begin` samples a prompt's first token; `decode_round` is one round for all slots: verify, accept, fold, draft."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.config import PAGE
from ninfer_jax.decoding import Choice, choose, judge
from ninfer_jax.model import TextModel
from ninfer_jax.model.attention import Heads
from ninfer_jax.model.gdn import GatedDeltaNet, Mixed
from ninfer_jax.programs.draft import propose
from ninfer_jax.state import State
from pallas_kernels.attention import append, decode_attention
from pallas_kernels.delta_rule import Transitions, decode_delta_rule, fold_transitions


class RoundOutput(NamedTuple):
    """What the host reads after a round (S slots, R = K + 1 rows; R = 1 for `begin`).

    tokens int32 `[S, R]`, the first `emitted[slot]` of them output; accepted int32 `[S]`: drafts among them; finished
    bool `[S]`; logprob float32 `[S, R]`; top_tokens and top_logprobs `[S, R, 20]`, zeros unless asked for.
    """

    tokens: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    finished: jax.Array
    logprob: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


class _Replay(NamedTuple):
    """What a GDN layer leaves behind in a round: replay records, and the raw convolution window
    `[S, width - 1 + R, channels]`."""

    transitions: Transitions
    window: jax.Array


def decode_round(model: TextModel, state: State, kv: str, valid_ids: int) -> tuple[State, RoundOutput]:
    """Rows [token, drafts] of every slot in one pass, then everything that follows from their logits."""
    slots = state.slots
    rows = jnp.concatenate([slots.token[:, None], slots.drafts], axis=1)
    hidden, pools, replays = _verify(model, state, rows, kv)
    logits = model.logits(hidden).reshape(*rows.shape, -1)
    choice = choose(logits, state.sampling, slots.drafts, valid_ids)
    verdict = judge(choice.token, slots.drafts, state.sampling.stop_ids, slots.left, slots.active)
    state = state._replace(kv=pools)._replace(**_fold(state, replays, verdict.emitted))
    before = slots.length
    state = _emit(state, choice, verdict.emitted, verdict.finished)
    if model.has_mtp:
        state = propose(model, state, choice.token, hidden.reshape(*rows.shape, -1), before, verdict.emitted, kv, valid_ids)
    return state, _output(choice, verdict.emitted, verdict.accepted, verdict.finished)


def begin(model: TextModel, state: State, slot: jax.Array, kv: str, valid_ids: int) -> tuple[State, RoundOutput]:
    """The first token of `slot`, whose prompt has been prefilled, and its first drafts; the slot becomes active."""
    slots = state.slots
    count = slots.length.shape[0]
    mine = jnp.arange(count) == slot
    # All slots go through the same rows as a decode round, so the first token comes from the same arithmetic.
    logits = model.logits(slots.hidden)[:, None]
    choice = choose(logits, state.sampling, jnp.zeros((count, 0), jnp.int32), valid_ids)
    verdict = judge(choice.token, jnp.zeros((count, 0), jnp.int32), state.sampling.stop_ids, slots.left, mine)
    # The prompt's last token is consumed already: one token comes out, none is folded in.
    started = slots._replace(active=slots.active | mine, length=slots.length - verdict.emitted)
    state = _emit(state._replace(slots=started), choice, verdict.emitted, verdict.finished)
    if model.has_mtp:
        state = propose(model, state, choice.token, slots.hidden[:, None], slots.length - 1, verdict.emitted, kv, valid_ids)
    return state, _output(choice, verdict.emitted, verdict.accepted, verdict.finished)


def _verify(model: TextModel, state: State, rows: jax.Array, kv: str) -> tuple[jax.Array, tuple, list[_Replay]]:
    """All rows through the text tower. Returns final-normed hidden `[S * R, hidden]`, the pools with the rows' keys and
    values, and per GDN layer what a fold needs; recurrent states are only read."""
    slots = state.slots
    count, width = rows.shape
    position = slots.length[:, None] + jnp.arange(width)
    where = jnp.where(slots.active[:, None], position, -1).reshape(-1)
    filled = jnp.where(slots.active, jnp.minimum(slots.length + width, slots.table.shape[1] * PAGE), 0)
    table = jnp.repeat(slots.table, width, axis=0)
    turned = (position + slots.rope_delta[:, None]).reshape(-1)
    cos, sin = model.rotary(jnp.broadcast_to(turned, (3, count * width)))
    h = model.embed(rows.reshape(-1))
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
                out, replay = _recur(mixer, mixed, state.recurrent[at], state.conv[at], width)
                replays.append(replay)
                return out

            h = layer.linear_attention(h, recur)
            linear_at += 1
    return model.norm(h), tuple(pools), replays


def _recur(
    mixer: GatedDeltaNet, mixed: Mixed, recurrent: jax.Array, conv: jax.Array, width: int
) -> tuple[jax.Array, _Replay]:
    raw, g, beta = (x.reshape(-1, width, *x.shape[1:]) for x in (mixed.raw, mixed.g, mixed.beta))
    window = jnp.concatenate([conv, raw], axis=1)
    q, k, v = mixer.convolve(window)
    transitions = Transitions(k, v, g, beta)
    out = decode_delta_rule(recurrent, q, transitions)
    return out.reshape(-1, *out.shape[2:]), _Replay(transitions, window)


def _fold(state: State, replays: list[_Replay], emitted: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
    """Recurrent and convolution states after the rows whose tokens were emitted."""
    recurrent, conv = [], []
    for before, kept, replay in zip(state.recurrent, state.conv, replays, strict=True):
        recurrent.append(fold_transitions(before, replay.transitions, emitted))
        columns = emitted[:, None] + jnp.arange(kept.shape[1])
        conv.append(jnp.take_along_axis(replay.window, columns[..., None], axis=1))
    return {"recurrent": tuple(recurrent), "conv": tuple(conv)}


def _emit(state: State, choice: Choice, emitted: jax.Array, finished: jax.Array) -> State:
    """Book the emitted tokens: lengths, the pending token, counts for penalties, the end of a sequence."""
    slots, sampling = state.slots, state.sampling
    width = choice.token.shape[1]
    last = jnp.take_along_axis(choice.token, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
    slots = slots._replace(
        length=slots.length + emitted,
        token=jnp.where(emitted > 0, last, slots.token),
        left=slots.left - emitted,
        active=slots.active & ~finished,
    )
    out = (jnp.arange(width) < emitted[:, None]).astype(jnp.int32)
    counts = sampling.counts.at[jnp.arange(out.shape[0])[:, None], choice.token].add(out)
    return state._replace(slots=slots, sampling=sampling._replace(counts=counts, emitted=sampling.emitted + emitted))


def _output(choice: Choice, emitted: jax.Array, accepted: jax.Array, finished: jax.Array) -> RoundOutput:
    return RoundOutput(
        choice.token, emitted, accepted, finished, choice.logprob, choice.top_tokens, choice.top_logprobs
    )

