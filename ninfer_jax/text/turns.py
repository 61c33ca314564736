"""Turns of a conversation in its token ids, by the control token that opens each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ninfer_jax.text.tokenizer import Tokenizer

OPEN = "<|im_start|>"
ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """A turn opens at token `start`; role: one of `ROLES`, "" for any other."""

    start: int
    role: str


def turns_of(ids: Sequence[int], tokenizer: Tokenizer) -> list[Turn]:
    """The turns of a prompt, in order; [] where it has none, as raw text, or the tokenizer no such control token."""
    if not tokenizer.has_text:
        return []
    try:
        opens = tokenizer.token_id(OPEN)
    except ValueError:
        return []
    roles = {role: tokenizer.encode(role) for role in ROLES}
    found = []
    for start in np.flatnonzero(np.asarray(ids) == opens).tolist():
        role = next((role for role, spelt in roles.items() if list(ids[start + 1 : start + 1 + len(spelt)]) == spelt), "")
        found.append(Turn(start, role))
    return found
