"""Drafting by looking up: what followed the last tokens when they stood in the sequence before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Tokens of the longest match that is told from a shorter one, and of the shortest that is taken.
LONGEST, SHORTEST = 8, 2


def append(history: jax.Array, start: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """`history` int32 `[S, context]` with the first `count[slot]` of `tokens[slot]` at `start[slot]` and after it; tokens int32
    `[S, R]`, start and count int32 `[S]`. In place where `history` may be overwritten."""
    row = jnp.arange(tokens.shape[1])
    where = jnp.where(row < count[:, None], start[:, None] + row, history.shape[1])
    return history.at[jnp.arange(len(history))[:, None], where].set(tokens, mode="drop")


def look_up(history: jax.Array, filled: jax.Array, width: int, shortest: int = SHORTEST, longest: int = LONGEST) -> jax.Array:
    """int32 `[S, width]`: what followed the latest of the longest matches of each sequence's last tokens; -1 where fewer than
    `shortest` match.

    history int32 `[S, context]`, of which `filled` int32 `[S]` tokens are there. More than `longest` tokens are not compared, and
    places with fewer before them are passed over. A match may reach up to the end: what follows then is its own
    continuation, so a sequence with a period goes on with it.
    """
    context = history.shape[1]
    at = jnp.arange(longest, context)
    last = jnp.take_along_axis(history, filled[:, None] - 1 - jnp.arange(longest), axis=1)
    same, length = True, jnp.zeros((len(history), len(at)), jnp.int32)
    for back in range(longest):
        same &= history[:, longest - 1 - back :][:, : len(at)] == last[:, back, None]
        length += same
    # One number says both which match is the longest and, of those, which is the latest.
    shift = (context - 1).bit_length()
    found = jnp.where((length >= shortest) & (at < filled[:, None]), (length << shift) | at, 0)
    best = jnp.max(found, axis=1, initial=0)[:, None]
    start = best & ((1 << shift) - 1)
    period = jnp.maximum(filled[:, None] - start, 1)
    following = jnp.take_along_axis(history, start + jnp.arange(width) % period, axis=1)
    return jnp.where(best > 0, following, -1)
