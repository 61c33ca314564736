"""The delta rule token by token: decode and verify rows, and the replay of accepted transitions.

Per value head, with S `[key_dim, value_dim]` (Gated Delta Networks, Yang et al. 2024, eq. 10):
    S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q
Verification must be able to take rows back, and S cannot be inverted. So a verify pass leaves S as it is and records
(k, v, exp(g), beta) of each row; `fold_transitions` then replays the accepted ones with the very same arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.elementary import rounded


class Transitions(NamedTuple):
    """Replay records of `rows` tokens a slot, float32. k `[slots, rows, key_heads, key_dim]`,
    v `[slots, rows, value_heads, value_dim]`, decay (exp(g)) and beta `[slots, rows, value_heads]`. The exponential is
    recorded, not its argument: a compiler rounds it one way or another, depending on what it fused around it."""

    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array


def decode_delta_rule(state: jax.Array, q: jax.Array, transitions: Transitions, zero: jax.Array) -> jax.Array:
    """Outputs of the rows that follow `state`, which stays as it is.

    state float32 `[slots, value_heads, key_dim, value_dim]`, q `[slots, rows, key_heads, key_dim]`, zero from
    `opaque_zero`; returns float32 `[slots, rows, value_heads, value_dim]`. A row's bits depend on the rows before it only.
    """
    share = transitions.v.shape[2] // q.shape[2]
    outputs = []
    for row in range(q.shape[1]):
        if row:
            state = _step(state, _row(transitions, row - 1), zero)
        k, decay, u = _update(state, _row(transitions, row), zero)
        q_row = jnp.repeat(q[:, row], share, axis=1)
        # S'^T q = decay S^T q + (k . q) u: the state after the last row is never formed.
        seen = _read_out(state, q_row)
        overlap = jnp.sum(rounded(k * q_row, zero), axis=-1, keepdims=True)
        outputs.append(rounded(decay * seen, zero) + rounded(overlap * u, zero))
    return jnp.stack(outputs, axis=1)


def fold_transitions(state: jax.Array, transitions: Transitions, accepted: jax.Array, zero: jax.Array) -> jax.Array:
    """`state` after the first `accepted[slot]` recorded rows; int32 `[slots]`, 0 leaves a slot's state untouched."""

    def replay(row: jax.Array, state: jax.Array) -> jax.Array:
        stepped = _step(state, _row(transitions, row), zero)
        return jnp.where((row < accepted)[:, None, None, None], stepped, state)

    return jax.lax.fori_loop(0, jnp.max(accepted), replay, state)


def _row(transitions: Transitions, row: int | jax.Array) -> Transitions:
    """One row of every slot, without the rows axis."""
    return Transitions(*(x[:, row] for x in transitions))


def _step(state: jax.Array, row: Transitions, zero: jax.Array) -> jax.Array:
    """decay S + k u^T, both products rounded before they are added."""
    k, decay, u = _update(state, row, zero)
    return rounded(decay[..., None] * state, zero) + rounded(k[..., None] * u[..., None, :], zero)


def _update(state: jax.Array, row: Transitions, zero: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """k `[slots, value_heads, key_dim]`, decay `[slots, value_heads, 1]` and u `[slots, value_heads, value_dim]`."""
    share = row.v.shape[1] // row.k.shape[1]
    k = jnp.repeat(row.k, share, axis=1)  # value head h reads key head h // share
    decay = row.decay[..., None]
    # The decay is applied to the read-out, not to a decayed copy of the state: S is read once for it.
    return k, decay, row.beta[..., None] * (row.v - rounded(decay * _read_out(state, k), zero))


def _read_out(state: jax.Array, x: jax.Array) -> jax.Array:
    """S^T x for every slot and head. As a matrix-vector product: its sums run the same way wherever it stands, and no
    array of the state's size is written."""
    return jnp.einsum("shkv,shk->shv", state, x, precision=jax.lax.Precision.HIGHEST)
