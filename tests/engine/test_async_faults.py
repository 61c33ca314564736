"""What fails in an engine that many share, beside its programs: who is told, who goes on, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from shared import LONG, PARAMS, PROMPTS, ended, same

from ninfer_jax import AnswerLost, AsyncEngine, EngineStopped
from ninfer_jax.engine.sequence import Sequence

pytestmark = pytest.mark.micro


@pytest.fixture
def held(shared: AsyncEngine) -> Iterator[Callable[[], None]]:
    """The engine's thread is busy until this is called."""
    gate, inside = threading.Event(), threading.Event()
    shared.call(lambda engine: (inside.set(), gate.wait(60)))
    assert inside.wait(60)
    yield gate.set
    gate.set()


def once(error: BaseException, function: Callable, when: Callable[..., bool] = lambda *_: True) -> Callable:
    """`function`, which raises `error` instead the first time that `when` holds."""
    left = [error]

    def failing(*arguments, **options):
        if left and when(*arguments):
            raise left.pop()
        return function(*arguments, **options)

    return failing


def test_a_fault_with_a_whole_state_costs_those_that_hold_slots(shared, right, held, micro_drafting, monkeypatch):
    """Two slots and five requests: two are lost, and each of the others has its own answer."""
    runner = micro_drafting.runner
    monkeypatch.setattr(runner, "finish", once(OSError("books"), runner.finish, lambda: runner.busy == 2))
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (5, 7, 1, 2, 3)]
    held()
    for answer in answers[:2]:
        with pytest.raises(AnswerLost, match="OSError: books; ask again$"):
            ended(answer)
    assert all(map(same, map(ended, answers[2:]), (right[at] for at in (1, 2, 3))))
    assert shared.load().numbers["engine_faults"] == 1


def test_a_fault_before_anybody_has_a_slot_costs_all_that_wait(shared, right, held, micro_drafting, monkeypatch):
    """There is nobody else whose fault it could be, and it would come again."""
    runner = micro_drafting.runner
    monkeypatch.setattr(runner, "turn", once(OSError("order"), runner.turn))
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (0, 1, 2)]
    held()
    for answer in answers:
        with pytest.raises(AnswerLost, match="OSError: order; ask again$"):
            ended(answer)
    assert same(ended(shared.submit(PROMPTS[1], PARAMS[1])), right[1])


def test_whoever_waits_when_the_thread_stops_is_told_why(shared, micro_drafting, monkeypatch):
    """Answers and calls alike."""
    calls = []

    def stop():
        calls.append(shared.call(lambda engine: 1))
        raise SystemExit("out")

    monkeypatch.setattr(micro_drafting.runner, "turn", stop)
    with pytest.raises(AnswerLost, match="SystemExit: out; ask again$"):
        ended(shared.submit(PROMPTS[0], PARAMS[0]))
    with pytest.raises(EngineStopped, match="^the engine has stopped: SystemExit: out; load it again$"):
        calls[0].result(timeout=60)


@pytest.mark.parametrize("error", [ValueError("room"), RuntimeError("room"), KeyError("room"), OSError("room")], ids=repr)
def test_a_request_that_cannot_be_queued_is_lost_alone(shared, right, held, micro_drafting, monkeypatch, error):
    runner = micro_drafting.runner
    monkeypatch.setattr(runner, "submit", once(error, runner.submit))
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (0, 1, 2)]
    held()
    with pytest.raises(AnswerLost, match=f"{type(error).__name__}: .*room"):
        ended(answers[0])
    assert same(ended(answers[1]), right[1]) and same(ended(answers[2]), right[2])
    assert shared.load().numbers["engine_faults"] == 0


@pytest.mark.parametrize("error", [RuntimeError("later"), KeyError("later"), OSError("later")], ids=repr)
def test_work_for_an_idle_engine_that_fails_is_noted(shared, right, micro_drafting, monkeypatch, error):
    runner, failed = micro_drafting.runner, threading.Event()

    def idle():
        failed.set()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runner, "idle", idle)
        assert same(ended(shared.submit(PROMPTS[0], PARAMS[0])), right[0])
        assert failed.wait(60)
        assert same(ended(shared.submit(PROMPTS[1], PARAMS[1])), right[1])
    assert shared.call(lambda engine: 1).result(timeout=60) == 1
    assert type(error).__name__ in runner.faults[0] and shared.load().numbers["engine_faults"] == 0
    runner.faults.clear()  # others use that engine


@pytest.mark.parametrize("error", [RuntimeError("text"), UnicodeError("text"), KeyError("text")], ids=repr)
def test_a_cancelled_answer_whose_text_fails_is_lost_alone(shared, right, held, monkeypatch, error):
    def long(sequence, *_):
        return sequence.budget == LONG.max_new_tokens

    monkeypatch.setattr(Sequence, "cancel", _method(once(error, Sequence.cancel, long)))
    lost, other = shared.submit(PROMPTS[0], LONG), shared.submit(PROMPTS[1], PARAMS[1])
    lost.cancel()
    held()
    with pytest.raises(AnswerLost, match=f"{type(error).__name__}: .*text"):
        ended(lost)
    assert same(ended(other), right[1])
    assert shared.load().numbers["engine_faults"] == 0


def _method(function: Callable) -> Callable:
    return lambda self, *arguments: function(self, *arguments)


def test_an_answer_whose_readers_event_loop_is_gone_is_cancelled(shared, held, drained, micro_drafting):
    """It would take 180 tokens to its end; it has those of the rounds that were under way."""
    counts, running = micro_drafting.runner.counts, shared.submit(PROMPTS[0], LONG)
    before, loop = counts.tokens, asyncio.new_event_loop()
    waiting = loop.create_task(running.wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    held()
    shared.call(lambda engine: None).result(timeout=60)
    drained()
    assert 0 < counts.tokens - before < 10
    waiting.get_coro().close()
