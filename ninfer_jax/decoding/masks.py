"""Grammar masks on the device: logits of tokens that a grammar forbids, out of the draws that they were made for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Masks(NamedTuple):
    """Tokens that the rows of each slot's next draw may be.

    words uint32 `[S, rows, ceil(V / 32)]`: bit v % 32 of word v // 32 allows token v behind the row's drafts
    (`ninfer_jax.text.grammar.Matcher.mask`). at int32 `[S]`: which token of the answer row 0 draws, counted from 1; 0 for a
    slot without a grammar. They hold for that draw alone: any later one passes over them.
    """

    words: jax.Array
    at: jax.Array


def constrained(masks: Masks, emitted: jax.Array) -> jax.Array:
    """Whether masks hold for each slot's next draw, bool `[S]`; emitted int32 `[S]`: tokens drawn so far."""
    return masks.at == emitted + 1


def masks_struct(slots: int, rows: int, vocab: int) -> Masks:
    """Shapes and dtypes of `Masks`."""
    struct: Any = jax.ShapeDtypeStruct
    return Masks(struct((slots, rows, -(-vocab // 32)), jnp.uint32), struct((slots,), jnp.int32))


def masked(logits: jax.Array, mask: jax.Array, on: jax.Array) -> jax.Array:
    """Logits float32 `[S, rows, V]`, -inf where a constrained slot's mask has no bit; as they are where none is.

    mask uint32 `[S, rows, ceil(V / 32)]`, as in `Masks`. on bool `[S]`.

    Applied ahead of truncation and the draw, so a forbidden draft is never what its row draws: acceptance ends there,
    the answer is that of one token at a time under the same masks, and the rows behind it, whose masks say nothing, count for
    nothing. A row that allows nothing is left as it is: there is no token to draw from it, and no NaN may come of it.
    """

    def apply() -> jax.Array:
        vocab = logits.shape[-1]
        bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(*mask.shape[:-1], -1)[..., :vocab].astype(bool)
        free = ~(on[:, None] & jnp.any(allowed, axis=-1))
        return jnp.where(allowed | free[..., None], logits, -jnp.inf)

    return jax.lax.cond(jnp.any(on), apply, lambda: logits)
