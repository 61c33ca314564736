"""Rows of a round that become output: the speculative accept rule and the ends of a completion.

The drafts are deterministic given the past (the MTP head's argmax, or what followed before), so a draft distribution is
one-hot and the exact accept rule
(Leviathan et al. 2023, algorithm 1; Chen et al. 2023) is: accept d with the target's probability p(d), else draw from
p with d removed. Drawing x from p and accepting iff x = d has exactly that law: it accepts with probability p(d), and
given rejection x is distributed as p without d. Using the same uniform number as plain decoding for that draw makes
speculative and plain output equal token for token, sampled as well as greedy.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verdict(NamedTuple):
    """emitted int32 `[S]`: rows whose token is output, and transitions to fold; drafted int32 `[S]`: drafts that there were;
    accepted int32 `[S]`: those among the emitted; finished bool `[S]`: an end token was emitted or nothing is left to emit."""

    emitted: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    finished: jax.Array


def judge(
    tokens: jax.Array, drafts: jax.Array, parents: jax.Array, stop_ids: jax.Array, left: jax.Array, active: jax.Array
) -> Verdict:
    """tokens int32 `[S, K + 1]` drawn for the rows; drafts int32 `[S, K]`, those of the rows behind the first, -1 where there is
    none; parents int32 `[S, K + 1]`: the row whose draw a row's draft is compared with, the one before it in a chain;
    stop_ids int32 `[S, n]`, left int32 `[S]`."""
    rows = tokens.shape[1]
    drawn = tokens[:, :1]
    for row in range(1, rows - 1):  # on a card a gather would be a launch of its own
        drawn = jnp.where(parents[:, 1:] == row, tokens[:, row : row + 1], drawn)
    agree = jnp.cumprod((drawn == drafts).astype(jnp.int32), axis=1)
    count = 1 + jnp.sum(agree, axis=1)
    ends = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)
    first_end = jnp.min(jnp.where(ends, jnp.arange(rows), rows), axis=1)
    emitted = jnp.minimum(jnp.minimum(count, left), first_end + 1)
    emitted = jnp.where(active, emitted, 0)
    finished = active & ((first_end < emitted) | (emitted >= left))
    drafted = jnp.where(active, jnp.sum((drafts >= 0).astype(jnp.int32), axis=1), 0)
    return Verdict(emitted, drafted, jnp.maximum(jnp.minimum(emitted, count - 1), 0), finished)
