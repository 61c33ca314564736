"""Grammar masks on the device: logits of tokens that a grammar forbids, out of every draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def masked(logits: jax.Array, mask: jax.Array, constrained: jax.Array) -> jax.Array:
    """Logits float32 `[S, rows, V]`, -inf where a constrained slot's mask has no bit; as they are where no slot is constrained.

    mask uint32 `[S, rows, ceil(V / 32)]`: bit v % 32 of word v // 32 allows token v behind the row's drafts
    (`ninfer_jax.text.grammar.Matcher.mask`). constrained bool `[S]`.

    Applied ahead of penalties, truncation and the draw, so a forbidden draft is never what its row draws: acceptance ends there,
    the answer is that of one token at a time under the same masks, and the rows behind it, whose masks say nothing, count for
    nothing. A row that allows nothing is left as it is: there is no token to draw from it, and no NaN may come of it.
    """

    def apply() -> jax.Array:
        vocab = logits.shape[-1]
        bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(*mask.shape[:-1], -1)[..., :vocab].astype(bool)
        free = ~(constrained[:, None] & jnp.any(allowed, axis=-1))
        return jnp.where(allowed | free[..., None], logits, -jnp.inf)

    return jax.lax.cond(jnp.any(constrained), apply, lambda: logits)
