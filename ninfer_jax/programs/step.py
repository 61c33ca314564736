"""`step`: what a decode round computes for one row, with a given token in place of the drawn one and every logit as its result.

A decode round gives out at most the 20 most likely tokens, because nobody who generates needs more. Here the same functions that a
round is made of run on a text. A row's bits do not depend on the rows beside it, so they are those of decoding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.model import TextModel
from ninfer_jax.programs.lookup import append
from ninfer_jax.programs.pending import accept
from ninfer_jax.programs.verify import verify_rows
from ninfer_jax.state import State


def step(model: TextModel, state: State, slot: jax.Array, token: jax.Array, kv: str) -> tuple[State, jax.Array]:
    """One row of one slot through the layers and into its states, as `decode_round` does it; the state, and float32
    logits `[vocab rows]`. slot, token: int32 scalars. Nothing is drawn or drafted, and the other slots stay as they are."""
    slots = state.slots
    mine = jnp.arange(slots.length.shape[0]) == slot
    rows = jnp.where(mine, token, 0)[:, None]
    here = state._replace(slots=slots._replace(active=mine))
    emitted = mine.astype(jnp.int32)
    hidden, here = verify_rows(model, here, rows, kv)
    logits = model.logits(hidden[:, 0])
    after = accept(here, mine, emitted)
    linked = slots.linked & ~mine  # its MTP entry waits for nothing
    history = state.history
    if history is not None:
        after = after._replace(history=append(history, slots.length, rows, emitted))
    return after._replace(slots=slots._replace(length=slots.length + emitted, linked=linked)), logits[slot]
