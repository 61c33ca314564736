"""Drafts that are looked up in a sequence's own tokens, against a search in plain Python."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from looking import searched

from ninfer_jax.programs.lookup import LONGEST, append, look_up

CONTEXT, SLOTS = 40, 3


@pytest.mark.parametrize("shortest, longest", [(1, 1), (2, 4), (4, 4), (3, 8)])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_what_is_looked_up_is_what_a_search_finds(width: int, shortest: int, longest: int) -> None:
    """Few different tokens, so that there are many matches of every length; behind what is filled stands a decoy."""
    find = jax.jit(partial(look_up, width=width, shortest=shortest, longest=longest))
    rng = np.random.default_rng(width)
    lengths = set()
    for case in range(400):
        history = rng.integers(0, 2 + case % 5, (SLOTS, CONTEXT)).astype(np.int32)
        filled = rng.integers(1, CONTEXT + 1, SLOTS).astype(np.int32)
        found = np.asarray(find(history, filled))
        for slot in range(SLOTS):
            expected = searched(history[slot, : filled[slot]].tolist(), width, shortest, longest)
            assert found[slot].tolist() == expected, (history[slot, : filled[slot]], expected)
            lengths.add(expected[0] < 0)
    assert lengths == {True, False}


def test_a_period_goes_on() -> None:
    history = np.array([[9, 9, 9, 9, 1, 2, 3, 1, 2, 3, 1, 2, 0, 0]], np.int32)
    assert jax.jit(partial(look_up, width=5))(history, np.array([12])).tolist() == [[3, 1, 2, 3, 1]]


@pytest.mark.parametrize("context", [1, 2, 7, 8, 9])
def test_a_context_of_few_tokens_has_nothing_to_look_up(context: int) -> None:
    found = jax.jit(partial(look_up, width=2))(np.zeros((1, context), np.int32), np.array([context]))
    assert found.tolist() == ([[0, 0]] if context > LONGEST else [[-1, -1]])


def test_tokens_are_written_behind_each_other_and_never_past_the_end() -> None:
    rng, write = np.random.default_rng(2), jax.jit(append)
    for _ in range(100):
        history = rng.integers(0, 100, (SLOTS, CONTEXT)).astype(np.int32)
        tokens = rng.integers(100, 200, (SLOTS, 4)).astype(np.int32)
        start, count = rng.integers(0, CONTEXT, SLOTS), rng.integers(0, 5, SLOTS)
        expected = history.tolist()
        for slot in range(SLOTS):
            for row in range(count[slot]):
                if start[slot] + row < CONTEXT:
                    expected[slot][start[slot] + row] = int(tokens[slot, row])
        assert write(history, start, tokens, count).tolist() == expected
