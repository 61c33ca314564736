"""`begin` samples a prompt's first token; `decode_round` is one round for all slots: verify, accept, fold, draft."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.decoding import (
    Choice,
    Masks,
    SamplingState,
    Verdict,
    all_logits_needed,
    choose,
    choose_among,
    choose_what_is_asked,
    judge,
)
from ninfer_jax.model import TextModel
from ninfer_jax.programs.draft import propose
from ninfer_jax.programs.pending import accept
from ninfer_jax.programs.verify import verify_rows
from ninfer_jax.state import State


class RoundOutput(NamedTuple):
    """The arrays that the host reads after a round (S slots, R = K + 1 rows; R = 1 for `begin`).

    tokens int32 `[S, R]`, the first `emitted[slot]` of them output; drafted int32 `[S]`: drafts that were there to be accepted;
    accepted int32 `[S]`: those that were; finished bool `[S]`; logprob float32 `[S, R]`; top_tokens and top_logprobs
    `[S, R, 20]`, zeros unless asked for.
    """

    tokens: jax.Array
    emitted: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    finished: jax.Array
    logprob: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def decode_round(model: TextModel, state: State, kv: str, valid_ids: int) -> tuple[State, RoundOutput]:
    """Rows [token, drafts] of every slot through the model in one pass, then everything that follows from their logits."""
    slots = state.slots
    # A row without a draft, -1, goes through the layers as any token would: no draw is -1.
    rows = jnp.concatenate([slots.token[:, None], jnp.maximum(slots.drafts, 0)], axis=1)
    hidden, state = verify_rows(model, state, rows, kv)
    choice = choose_rows(model, hidden, state.sampling, slots.drafts, valid_ids, state.masks)
    verdict = judge(choice.token, slots.drafts, slots.parents, state.sampling.stop_ids, slots.left, slots.active)
    state = accept(state, slots.active, verdict.emitted)
    before = slots.length
    state = _emit(state, choice, verdict.emitted, verdict.finished)
    state = propose(model, state, choice.token, hidden, before, verdict.emitted, kv, valid_ids)
    return state, _output(choice, verdict)


def begin(model: TextModel, state: State, slot: jax.Array, kv: str, valid_ids: int) -> tuple[State, RoundOutput]:
    """The first token of `slot`, whose prompt has been prefilled, and its first drafts; the slot becomes active."""
    slots = state.slots
    count = slots.length.shape[0]
    mine = jnp.arange(count) == slot
    none, first = jnp.zeros((count, 0), jnp.int32), state.masks._replace(words=state.masks.words[:, :1])
    choice = choose_rows(model, slots.hidden[:, None], state.sampling, none, valid_ids, first)
    verdict = judge(choice.token, none, slots.parents[:, :1], state.sampling.stop_ids, slots.left, mine)
    # The prompt's last token is consumed already: one token comes out, none is folded in.
    started = slots._replace(active=slots.active | mine, length=slots.length - verdict.emitted, linked=slots.linked & ~mine)
    state = _emit(state._replace(slots=started), choice, verdict.emitted, verdict.finished)
    state = propose(model, state, choice.token, slots.hidden[:, None], slots.length - 1, verdict.emitted, kv, valid_ids)
    return state, _output(choice, verdict)


def choose_rows(
    model: TextModel, hidden: jax.Array, sampling: SamplingState, drafts: jax.Array, valid_ids: int, masks: Masks
) -> Choice:
    """Draw a token for every row of final-normed hidden `[S, R, hidden]`. All logits are computed only when some slot's
    settings or masks need them, where the head can do with less."""
    slots, rows, size = hidden.shape
    flat = hidden.reshape(slots * rows, size)

    def from_all() -> Choice:
        return choose(model.logits(flat).reshape(slots, rows, -1), sampling, drafts, valid_ids, masks)

    if not model.has_candidates(slots * rows):
        return choose_what_is_asked(model.logits(flat).reshape(slots, rows, -1), sampling, drafts, valid_ids, masks)
    return jax.lax.cond(
        all_logits_needed(sampling, masks),
        from_all,
        lambda: choose_among(lambda k: model.candidates(flat, k, valid_ids), sampling, rows),
    )


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


def _output(choice: Choice, verdict: Verdict) -> RoundOutput:
    return RoundOutput(choice.token, *verdict, choice.logprob, choice.top_tokens, choice.top_logprobs)
