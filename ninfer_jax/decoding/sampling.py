"""From logits to one token a row, on the device: penalties, truncation, and a draw keyed by (seed, token index).

The draw of the n-th token of a sequence uses one uniform number that only the seed and n decide. So a sampled answer
is reproducible, does not depend on the other slots, and comes out the same with drafts and without (see verify.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.decoding.masks import Masks, constrained, masked
from ninfer_jax.decoding.params import MAX_STOP_IDS, MAX_TOP_LOGPROBS, SamplingParams
from pallas_kernels.draw import draw_sorted, log_total
from pallas_kernels.elementary import opaque_zero, rounded

# Rows whose top_k is at most this sample from that many candidates; only the others pay for sorting the vocabulary.
CANDIDATES = 64


class SamplingState(NamedTuple):
    """Settings and history, one row a slot (S slots, V vocabulary rows).

    temperature, top_p, min_p, presence, frequency, repetition float32 `[S]`; top_k int32 `[S]` (0: off); key uint32
    `[S, 2]` (the seed); emitted int32 `[S]`: tokens drawn so far; top_logprobs bool `[S]`; all_logits bool `[S]`: what is
    asked needs more than the most likely candidates; stop_ids int32 `[S, 16]`, -1 where unused; bias float32, counts int32
    (generated tokens) and in_prompt bool `[S, V]`.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    key: jax.Array
    emitted: jax.Array
    top_logprobs: jax.Array
    all_logits: jax.Array
    stop_ids: jax.Array
    bias: jax.Array
    counts: jax.Array
    in_prompt: jax.Array


class Choice(NamedTuple):
    """Per row: token int32 `[S, rows]`, its log-probability float32 `[S, rows]`, and the 20 most likely tokens
    `[S, rows, 20]` with theirs (zeros unless a slot asked), all from the unmodified distribution."""

    token: jax.Array
    logprob: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def sampling_struct(slots: int, vocab: int) -> SamplingState:
    """Shapes and dtypes of a `SamplingState`."""
    struct: Any = jax.ShapeDtypeStruct
    number, integer, flag = (struct((slots,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool_))
    return SamplingState(
        temperature=number,
        top_k=integer,
        top_p=number,
        min_p=number,
        presence=number,
        frequency=number,
        repetition=number,
        key=struct((slots, 2), jnp.uint32),
        emitted=integer,
        top_logprobs=flag,
        all_logits=flag,
        stop_ids=struct((slots, MAX_STOP_IDS), jnp.int32),
        bias=struct((slots, vocab), jnp.float32),
        counts=struct((slots, vocab), jnp.int32),
        in_prompt=struct((slots, vocab), jnp.bool_),
    )


def choose(logits: jax.Array, state: SamplingState, drafts: jax.Array, valid: int, masks: Masks | None = None) -> Choice:
    """Draw a token for every row.

    logits float32 `[S, rows, V]`; drafts int32 `[S, rows - 1]`: row r is drawn as if drafts[:r] had been generated.
    Ids from `valid` on are padding rows of the matrix and never drawn. masks: of `rows` rows, for slots with a grammar; what they
    forbid is not drawn, and log-probabilities know nothing of them.
    """
    slots, rows, vocab = logits.shape
    logits = jnp.where(jnp.arange(vocab) < valid, logits, -jnp.inf)
    adjusted = _adjust(logits, state, drafts)
    if masks is not None:
        adjusted = masked(adjusted, masks.words, constrained(masks, state.emitted))
    token = most_likely(adjusted)
    sampling = state.temperature > 0
    index = state.emitted[:, None] + jnp.arange(rows)
    token = jax.lax.cond(
        jnp.any(sampling), lambda: jnp.where(sampling[:, None], _draw(adjusted, state, index), token), lambda: token
    )
    total = log_total(logits)
    logprob = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - total
    top = min(MAX_TOP_LOGPROBS, vocab)

    def best() -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logits, top)
        return ids.astype(jnp.int32), values - total[..., None]

    top_tokens, top_logprobs = jax.lax.cond(jnp.any(state.top_logprobs), best, lambda: _no_logprobs(slots, rows, top)[1:])
    return Choice(token, logprob, top_tokens, top_logprobs)


def needs_all_logits(params: SamplingParams) -> bool:
    """Whether draws with these settings depend on more than the 64 most likely tokens of the unmodified logits."""
    adjusted = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1 or params.logit_bias
    wide = params.temperature > 0 and not 0 < params.top_k <= CANDIDATES
    return bool(adjusted or wide or params.logprobs is not None)


def all_logits_needed(state: SamplingState, masks: Masks) -> jax.Array:
    """Whether some slot's draw depends on more than its most likely candidates: by its settings, or because a grammar may
    forbid them. A bool scalar."""
    return jnp.any(state.all_logits | constrained(masks, state.emitted))


def choose_what_is_asked(logits: jax.Array, state: SamplingState, drafts: jax.Array, valid: int, masks: Masks) -> Choice:
    """`choose`, but without log-probabilities (zeros), penalties, biases and masks where no slot asks for any of these."""
    slots, rows, vocab = logits.shape

    def candidates(k: int) -> tuple[jax.Array, jax.Array]:
        flat = jnp.where(jnp.arange(vocab) < valid, logits, -jnp.inf).reshape(slots * rows, vocab)
        if k == 1:
            ids = most_likely(flat)[:, None]
            return jnp.take_along_axis(flat, ids, axis=-1), ids
        values, ids = jax.lax.top_k(flat, min(k, vocab))
        return values, ids.astype(jnp.int32)

    return jax.lax.cond(
        all_logits_needed(state, masks),
        lambda: choose(logits, state, drafts, valid, masks),
        lambda: choose_among(candidates, state, rows, min(MAX_TOP_LOGPROBS, vocab)),
    )


def choose_among(
    candidates: Callable[[int], tuple[jax.Array, jax.Array]], state: SamplingState, rows: int, top: int = MAX_TOP_LOGPROBS
) -> Choice:
    """`choose` where no slot has `all_logits`, from candidates alone: the same tokens, no log-probabilities (zeros).

    candidates(k) gives the k largest logits of every row float32 `[S * rows, k]`, falling, and their int32 ids.
    """
    slots = state.temperature.shape[0]

    def greedy() -> jax.Array:
        return candidates(1)[1].reshape(slots, rows)

    def drawn() -> jax.Array:
        values, ids = (x.reshape(slots, rows, -1) for x in candidates(CANDIDATES))
        index = state.emitted[:, None] + jnp.arange(rows)
        scaled = _scaled(values, state)
        token = _draw_sorted(scaled, ids, state, _uniforms(state, index))
        return jnp.where((state.temperature > 0)[:, None], token, ids[..., 0])

    token = jax.lax.cond(jnp.any(state.temperature > 0), drawn, greedy)
    return Choice(token, *_no_logprobs(slots, rows, top))


def _no_logprobs(slots: int, rows: int, top: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    lead = (slots, rows)
    return jnp.zeros(lead, jnp.float32), jnp.zeros((*lead, top), jnp.int32), jnp.zeros((*lead, top), jnp.float32)


def most_likely(logits: jax.Array) -> jax.Array:
    """Index of the first largest of `[..., V]`, int32. `jnp.argmax` reduces pairs, five times slower on a CPU (139 against
    24 microseconds for 32,768 logits, measured); for NaN this gives V - 1."""
    vocab = logits.shape[-1]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == largest, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def _adjust(logits: jax.Array, state: SamplingState, drafts: jax.Array) -> jax.Array:
    """Repetition, presence and frequency penalties, then biases. Products are rounded before anything is taken from them,
    so that no compiler makes one row's bits differ from another's."""
    zero = opaque_zero(state.emitted)

    def adjusted() -> jax.Array:
        rows = []
        counts = state.counts
        for row in range(logits.shape[1]):
            if row:
                counts = counts.at[jnp.arange(counts.shape[0]), drafts[:, row - 1]].add(1)
            x, generated = logits[:, row], counts > 0
            repetition = state.repetition[:, None]
            repeated = jnp.where(x > 0, x / repetition, rounded(x * repetition, zero))
            x = jnp.where(generated | state.in_prompt, repeated, x)
            x = x - jnp.where(generated, state.presence[:, None], 0.0) - rounded(counts * state.frequency[:, None], zero)
            rows.append(x + state.bias)
        return jnp.stack(rows, axis=1)

    changes = (state.presence != 0) | (state.frequency != 0) | (state.repetition != 1) | jnp.any(state.bias != 0, axis=1)
    return jax.lax.cond(jnp.any(changes), adjusted, lambda: logits)


def _draw(adjusted: jax.Array, state: SamplingState, index: jax.Array) -> jax.Array:
    vocab = adjusted.shape[-1]
    scaled = _scaled(adjusted, state)
    uniform = _uniforms(state, index)
    values, ids = jax.lax.top_k(scaled, min(CANDIDATES, vocab))
    few = _draw_sorted(values, ids, state, uniform)
    narrow = (state.top_k > 0) & (state.top_k <= values.shape[-1])

    def from_all() -> jax.Array:
        order = jnp.argsort(-scaled, axis=-1, stable=True)
        many = _draw_sorted(jnp.take_along_axis(scaled, order, axis=-1), order, state, uniform)
        return jnp.where(narrow[:, None], few, many)

    return jax.lax.cond(jnp.all(narrow | (state.temperature <= 0)), lambda: few, from_all)


def _draw_sorted(values: jax.Array, ids: jax.Array, state: SamplingState, uniform: jax.Array) -> jax.Array:
    """The id that `draw_sorted` chooses of candidates sorted from the most likely."""
    chosen = draw_sorted(values, state.top_k, state.top_p, state.min_p, uniform)
    return jnp.take_along_axis(ids, chosen[..., None], axis=-1)[..., 0].astype(jnp.int32)


def _scaled(logits: jax.Array, state: SamplingState) -> jax.Array:
    # From the largest logit down, so that a tiny temperature gives -inf and never inf - inf.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return below / jnp.where(state.temperature > 0, state.temperature, 1.0)[:, None, None]


def _uniforms(state: SamplingState, index: jax.Array) -> jax.Array:
    """One number in [0, 1) for each token index `[S, rows]`."""
    return jax.vmap(lambda key, n: jax.vmap(lambda i: _uniform(key, i))(n))(state.key, index)


def _uniform(key: jax.Array, index: jax.Array) -> jax.Array:
    """`jax.random.uniform`, spelled without its product and sum, which change nothing: 23 random bits behind a one, less one."""
    bits = jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index), (), jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
