"""The sums of a draw in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def draw_sorted(values: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, uniform: jax.Array) -> jax.Array:
    """`draw.draw_sorted`: inverse transform over candidates from the most likely on; every truncation keeps a prefix of them."""
    rank = jnp.arange(values.shape[-1])
    top_k = jnp.where(top_k > 0, top_k, values.shape[-1])[:, None, None]
    p = jax.nn.softmax(jnp.where(rank < top_k, values, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    keep = (rank < top_k) & (before < top_p[:, None, None]) & (p >= min_p[:, None, None] * p[..., :1])
    keep = keep | (rank == 0)
    reach = jnp.cumsum(jnp.where(keep, p, 0.0), axis=-1)
    # At most the last kept one, even where rounding leaves the sum just below the target.
    chosen = jnp.sum(reach <= uniform[..., None] * reach[..., -1:], axis=-1)
    return jnp.minimum(chosen, jnp.sum(keep & (p > 0), axis=-1) - 1).astype(jnp.int32)


def log_total(logits: jax.Array) -> jax.Array:
    """`draw.log_total`."""
    return jax.nn.logsumexp(logits, axis=-1)
