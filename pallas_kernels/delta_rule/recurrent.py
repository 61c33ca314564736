"""The delta rule token by token: decode and verify rows, and the replay of accepted transitions.

Per value head, with S `[key_dim, value_dim]` (Gated Delta Networks, Yang et al. 2024, eq. 10):
    S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q
Verification must be able to take rows back, and S cannot be inverted. So a verify pass leaves S as it is and records
(k, v, g, beta) of each row; `fold_transitions` then replays the accepted ones with the very same arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Transitions(NamedTuple):
    """Replay records of `rows` tokens a slot, float32. k `[slots, rows, key_heads, key_dim]`,
    v `[slots, rows, value_heads, value_dim]`, g and beta `[slots, rows, value_heads]`."""

    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def decode_delta_rule(state: jax.Array, q: jax.Array, transitions: Transitions) -> jax.Array:
    """Outputs of the rows that follow `state`, which stays as it is.

    state float32 `[slots, value_heads, key_dim, value_dim]`, q `[slots, rows, key_heads, key_dim]`; returns float32
    `[slots, rows, value_heads, value_dim]`.
    """
    share = transitions.v.shape[2] // q.shape[2]
    outputs = []
    for row in range(q.shape[1]):
        state = _step(state, transitions, row)
        q_row = jnp.repeat(q[:, row], share, axis=1)
        outputs.append(jnp.sum(state * q_row[..., None], axis=2))
    return jnp.stack(outputs, axis=1)


def fold_transitions(state: jax.Array, transitions: Transitions, accepted: jax.Array) -> jax.Array:
    """`state` after the first `accepted[slot]` recorded rows; int32 `[slots]`, 0 leaves a slot's state untouched."""
    for row in range(transitions.k.shape[1]):
        stepped = _step(state, transitions, row)
        state = jnp.where((row < accepted)[:, None, None, None], stepped, state)
    return state


def _step(state: jax.Array, transitions: Transitions, row: int) -> jax.Array:
    share = transitions.v.shape[2] // transitions.k.shape[2]
    k = jnp.repeat(transitions.k[:, row], share, axis=1)  # value head h reads key head h // share
    decay = jnp.exp(transitions.g[:, row])[..., None]
    # The decay is applied to the read-out, not to a decayed copy of the state: one pass over S for the read, one
    # for the update, and the same two fused loops whether rows are verified or replayed (hence the same bits).
    read = jnp.sum(state * k[..., None], axis=2)
    u = transitions.beta[:, row][..., None] * (transitions.v[:, row] - decay * read)
    return decay[..., None] * state + k[..., None] * u[..., None, :]
