"""The fold in plain jnp: accepted transitions replayed, the convolution window moved on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import Transitions, fold_transitions


def delta_fold(
    recurrent: jax.Array, conv: jax.Array, transitions: Transitions, projected: jax.Array, accepted: jax.Array, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    raw = projected[:, : conv.shape[2]].reshape(conv.shape[0], -1, conv.shape[2])
    return fold_transitions(recurrent, transitions, accepted, zero), shift_window(conv, raw, accepted)


def shift_window(conv: jax.Array, raw: jax.Array, accepted: jax.Array) -> jax.Array:
    """The window `[slots, width - 1, channels]` after `accepted[slot]` rows of raw inputs `[slots, rows, channels]`."""
    window = jnp.concatenate([conv, raw], axis=1)
    columns = accepted[:, None] + jnp.arange(conv.shape[1])
    return jnp.take_along_axis(window, columns[..., None], axis=1)
