"""Rows that wait for the next round: they are neither lost, nor counted twice, nor seen by another slot, whatever comes between
the rounds."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scripted import GREEDY, PROMPTS, ScriptedRunner, run

from ninfer_jax import Engine, SamplingParams
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.programs import PrefillInputs

WINDOW = 3  # raw inputs that the convolution of the bundled model looks back


def sequence(engine: Engine, prompt: str, budget: int, params: SamplingParams = GREEDY) -> Sequence:
    return Sequence(engine.tokenizer.encode(prompt), params, budget, 0, (), engine.tokenizer)


def started(engine: Engine, *budgets: int) -> tuple[ScriptedRunner, list[Sequence]]:
    """Sequences after their first rounds, with rows that wait in every slot."""
    runner = ScriptedRunner(engine)
    sequences = [sequence(engine, prompt, budget) for prompt, budget in zip(PROMPTS, budgets, strict=False)]
    for one in sequences:
        runner.submit(one)
    for _ in range(3):
        runner.advance()
    return runner, sequences


def arrays_of(state, slot: int) -> list[np.ndarray]:
    """All that a slot's later rounds read of its delta layers."""
    return [np.asarray(x[slot]) for x in jax.tree.leaves((state.recurrent, state.conv, state.pending))]


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.bits
def test_many_sequences_through_two_slots(plain_engine, draft_engine):
    """Slots change hands in the middle of the other's answer, with a round always under way; nothing is settled but by
    prefills. Tokens are those of one sequence at a time, a row a round."""
    budgets = [40, 9, 23, 30, 5, 17]
    answers = []
    for engine in (plain_engine, draft_engine):
        runner = ScriptedRunner(engine)
        runner.look_ahead = True
        sequences = [sequence(engine, prompt, budget) for prompt, budget in zip(PROMPTS, budgets, strict=False)]
        for one in sequences:
            runner.submit(one)
        while not all(one.finished for one in sequences):
            runner.advance()
        answers.append([one.tokens for one in sequences])
    assert answers[0] == answers[1] and [len(tokens) for tokens in answers[0]] == budgets


@pytest.mark.bits
def test_settling_changes_nothing_that_follows(draft_engine):
    """After every round, and never: the same tokens, and the same states to the last bit."""
    (left, (some, *_)), (settled, (others, *_)) = (started(draft_engine, 100, 100) for _ in range(2))
    assert np.asarray(left.state.pending.count).all()
    for _ in range(6):
        settled.settle()
        assert not np.asarray(settled.state.pending.count).any()
        left.advance()
        settled.advance()
    assert some.tokens == others.tokens
    for runner in (left, settled):
        runner.settle()
    for slot in (0, 1):
        assert int(left.state.slots.length[slot]) == int(settled.state.slots.length[slot]) > 20
        for layer, (got, want) in enumerate(zip(left.state.recurrent, settled.state.recurrent, strict=True)):
            np.testing.assert_array_equal(got[slot], want[slot], err_msg=f"layer {layer}")
        for got, want in zip(left.state.conv, settled.state.conv, strict=True):
            np.testing.assert_array_equal(got[slot, :WINDOW], want[slot, :WINDOW])


@pytest.mark.bits
def test_prefill_lets_what_waits_in_its_slot_enter_first(draft_engine):
    """A chunk appended in the middle of an answer: as if everything had been settled before. The other slot keeps its bits, what
    waits in it included."""
    programs, tokens = draft_engine.programs, np.array([7, 8, 9] + [0] * 61, np.int32)

    def append(settle: bool):
        runner, _ = started(draft_engine, 100, 100)
        if settle:
            runner.settle()
        before, length = arrays_of(runner.state, 1), int(runner.state.slots.length[0])
        positions = np.broadcast_to(length - 1 + np.arange(65, dtype=np.int32), (3, 65)).copy()
        inputs = PrefillInputs(np.int32(0), tokens, np.int32(3), positions)
        state, hidden = programs.prefill(runner.pool.parameters, runner.state, inputs)
        assert_same(arrays_of(state, 1), before)
        assert int(state.pending.count[0]) == int(state.pending.start[0]) == 0
        return [
            np.asarray(hidden[:3]),
            *(np.asarray(x[0]) for x in state.recurrent),
            *(np.asarray(x[0, :WINDOW]) for x in state.conv),
        ]

    assert_same(append(settle=False), append(settle=True))


@pytest.mark.bits
def test_a_round_leaves_a_slot_that_has_ended_as_it_is(draft_engine):
    """Its last rows still wait; further rounds for the other slot neither drop them nor let them enter twice."""
    runner, (first, second) = started(draft_engine, 8, 100)
    while not first.finished:
        runner.advance()
    before = arrays_of(runner.state, 0)
    length = len(second.tokens)
    for _ in range(3):
        runner.advance()
    assert len(second.tokens) > length
    assert_same(arrays_of(runner.state, 0), before)


def test_admission_forgets_what_waits(draft_engine):
    runner, (first, _) = started(draft_engine, 100, 100)
    assert int(runner.state.pending.count[0]) and int(runner.state.pending.start[0])
    runner.cancel(first)
    lease = runner.lease(10)
    pending = runner.state.pending
    assert lease.slot == 0
    assert int(pending.count[0]) == int(pending.start[0]) == 0 and int(pending.count[1])
    assert not any(np.asarray(x[0]).any() for x in (*runner.state.recurrent, *runner.state.conv))


@pytest.mark.bits
def test_states_with_drafts_are_those_without(plain_engine, draft_engine):
    """After every round, and the pages behind them."""
    prompt = plain_engine.tokenizer.encode(PROMPTS[0])
    truth, snapshots = run(plain_engine, prompt, GREEDY, budget=48)
    sequence, states = run(draft_engine, prompt, GREEDY, budget=48)
    assert sequence.tokens == truth.tokens and states.keys() < snapshots.keys()
    for emitted, arrays in states.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, snapshots[emitted][name], err_msg=f"{name} after {emitted}")
