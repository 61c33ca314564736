"""Draws from the head's candidates alone: the very tokens that all logits would give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.decoding import SamplingParams, choose, choose_among, needs_all_logits
from ninfer_jax.decoding.sampling import SamplingState, sampling_struct

SLOTS, ROWS, VOCAB, VALID = 64, 2, 300, 290
whole = jax.jit(choose, static_argnums=3)


def state_of(rng: np.random.Generator, **values: object) -> SamplingState:
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "stop_ids": -1} | values
    struct = sampling_struct(SLOTS, VOCAB)._asdict()
    return SamplingState(
        **{n: jnp.asarray(np.broadcast_to(neutral.get(n, 0), x.shape), x.dtype) for n, x in struct.items()}
    )._replace(key=jnp.asarray(rng.integers(0, 2**32, (SLOTS, 2)), jnp.uint32))


@jax.jit
def among(logits: jax.Array, state: SamplingState) -> jax.Array:
    flat = jnp.where(jnp.arange(VOCAB) < VALID, logits, -jnp.inf).reshape(SLOTS * ROWS, VOCAB)

    def candidates(k: int) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(flat, k)
        return values, ids.astype(jnp.int32)

    return choose_among(candidates, state, ROWS).token


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 64},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.9, "top_k": 40, "min_p": 0.1},
        {"temperature": np.where(np.arange(SLOTS) % 2, 0.0, 0.8), "top_k": 30},
    ],
)
def test_the_same_tokens(settings: dict[str, object]) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (SLOTS, ROWS, VOCAB)).astype(np.float32)
    logits[:8] = np.round(logits[:8])  # ties
    logits[..., VALID:] = 50.0  # padding rows would win
    state = state_of(rng, **settings)
    expected = whole(logits, state, jnp.zeros((SLOTS, ROWS - 1), jnp.int32), VALID).token
    np.testing.assert_array_equal(among(logits, state), expected)


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"temperature": 0}, False),
        ({"temperature": 1, "top_k": 64}, False),
        ({"temperature": 1, "top_k": 65}, True),
        ({"temperature": 1}, True),
        ({"temperature": 0, "logprobs": 0}, True),
        ({"temperature": 0, "presence_penalty": 0.1}, True),
        ({"temperature": 0, "frequency_penalty": -1}, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, True),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, True),
        ({"temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, False),
    ],
)
def test_what_needs_all_logits(settings: dict[str, object], needed: bool) -> None:
    assert needs_all_logits(SamplingParams(**settings)) is needed
