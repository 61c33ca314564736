"""`admit` and `release`: how a slot changes hands; `constrain`: what its next draw may be. Jitted like the rest, so that the host
never touches an array."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ninfer_jax.decoding import SamplingParams, needs_all_logits
from ninfer_jax.decoding.params import MAX_BIASES, MAX_STOP_IDS
from ninfer_jax.state import State


class Admission(NamedTuple):
    """A new sequence for `slot`: its block-table row, how many tokens it may emit, and its sampling settings."""

    slot: ArrayLike
    table: ArrayLike
    left: ArrayLike
    temperature: ArrayLike
    top_k: ArrayLike
    top_p: ArrayLike
    min_p: ArrayLike
    presence: ArrayLike
    frequency: ArrayLike
    repetition: ArrayLike
    key: ArrayLike
    top_logprobs: ArrayLike
    all_logits: ArrayLike
    stop_ids: ArrayLike
    bias_ids: ArrayLike
    bias_values: ArrayLike


def admission(slot: int, table: np.ndarray, left: int, params: SamplingParams, seed: int, stop_ids: tuple[int, ...]) -> Admission:
    """The host side of `admit`; plain numpy, fixed shapes."""
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(stop_ids)] = stop_ids
    ids, values = np.zeros(MAX_BIASES, np.int32), np.zeros(MAX_BIASES, np.float32)
    for at, (token, bias) in enumerate(params.logit_bias.items()):
        ids[at], values[at] = token, bias
    number = np.float32
    return Admission(
        np.int32(slot),
        table,
        np.int32(left),
        number(params.temperature),
        np.int32(max(params.top_k, 0)),
        number(params.top_p),
        number(params.min_p),
        number(params.presence_penalty),
        number(params.frequency_penalty),
        number(params.repetition_penalty),
        np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        np.bool_(bool(params.logprobs)),
        np.bool_(needs_all_logits(params)),
        stops,
        ids,
        values,
    )


def admit(state: State, new: Admission) -> State:
    """An empty sequence in `new.slot`: states zeroed, history forgotten, nothing consumed yet."""
    slot = new.slot

    def put(array: jax.Array, value: ArrayLike) -> jax.Array:
        return array.at[slot].set(value)

    slots, sampling = state.slots, state.sampling
    bias = jnp.zeros(sampling.bias.shape[1], jnp.float32).at[new.bias_ids].add(new.bias_values)
    pending = state.pending._replace(count=put(state.pending.count, 0), start=put(state.pending.start, 0))
    return state._replace(
        recurrent=tuple(put(x, 0) for x in state.recurrent),
        conv=tuple(put(x, 0) for x in state.conv),
        slots=slots._replace(
            table=put(slots.table, new.table),
            length=put(slots.length, 0),
            token=put(slots.token, 0),
            drafts=put(slots.drafts, -1),
            parents=put(slots.parents, jnp.arange(-1, slots.parents.shape[1] - 1)),
            hidden=put(slots.hidden, 0),
            linked=put(slots.linked, False),
            active=put(slots.active, False),
            left=put(slots.left, new.left),
            rope_delta=put(slots.rope_delta, 0),
        ),
        sampling=sampling._replace(
            temperature=put(sampling.temperature, new.temperature),
            top_k=put(sampling.top_k, new.top_k),
            top_p=put(sampling.top_p, new.top_p),
            min_p=put(sampling.min_p, new.min_p),
            presence=put(sampling.presence, new.presence),
            frequency=put(sampling.frequency, new.frequency),
            repetition=put(sampling.repetition, new.repetition),
            key=put(sampling.key, new.key),
            emitted=put(sampling.emitted, 0),
            top_logprobs=put(sampling.top_logprobs, new.top_logprobs),
            all_logits=put(sampling.all_logits, new.all_logits),
            stop_ids=put(sampling.stop_ids, new.stop_ids),
            bias=put(sampling.bias, bias),
            counts=put(sampling.counts, 0),
            in_prompt=put(sampling.in_prompt, False),
        ),
        pending=pending,
        masks=state.masks._replace(at=put(state.masks.at, 0)),
    )


def constrain(state: State, slot: jax.Array, words: jax.Array, drafts: jax.Array) -> State:
    """`slot` with masks uint32 `[R, words]` for its next draw alone (`Masks`), and with drafts int32 `[K]` to verify in it."""
    slots, masks = state.slots, state.masks
    return state._replace(
        slots=slots._replace(drafts=slots.drafts.at[slot].set(drafts)),
        masks=masks._replace(words=masks.words.at[slot].set(words), at=masks.at.at[slot].set(state.sampling.emitted[slot] + 1)),
    )


def release(state: State, slot: jax.Array) -> State:
    """The slot owns nothing any more: no page, no place in a round, no setting that costs the others time."""
    slots, sampling = state.slots, state.sampling
    return state._replace(
        slots=slots._replace(table=slots.table.at[slot].set(0), active=slots.active.at[slot].set(False)),
        sampling=sampling._replace(
            temperature=sampling.temperature.at[slot].set(0.0),
            top_logprobs=sampling.top_logprobs.at[slot].set(False),
            all_logits=sampling.all_logits.at[slot].set(False),
            presence=sampling.presence.at[slot].set(0.0),
            frequency=sampling.frequency.at[slot].set(0.0),
            repetition=sampling.repetition.at[slot].set(1.0),
            bias=sampling.bias.at[slot].set(0.0),
        ),
    )
