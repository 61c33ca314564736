"""Who waits for whom in an engine that many share, told by the order of its chunks and rounds; and how a request ends early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace

import pytest
from shared import LONG, PARAMS, PROMPTS, ended, same

from ninfer_jax import AnswerLost, AsyncEngine, Engine, EngineStopped, QueueFull
from ninfer_jax.engine import async_engine, runner
from ninfer_jax.engine.sequence import Sequence

pytestmark = pytest.mark.micro


@dataclass
class Pace:
    """What the device was told to do, in order: "C" a chunk, "R" a round, "P" a piece of the answer with the longest budget. No
    round is dispatched that has not been allowed, and nothing is read before the round after it is dispatched."""

    events: list[str] = field(default_factory=list)
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def allow(self, rounds: int = 100_000) -> None:
        self.allowed.release(rounds)


@pytest.fixture
def pace(shared: AsyncEngine, micro_drafting: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    pace, pool = Pace(), micro_drafting.runner.pool
    prefill, round_, push = pool.prefill, pool.round, Sequence.push

    def chunk(*arguments, **options):
        pace.events.append("C")
        return prefill(*arguments, **options)

    def rounds():
        assert pace.allowed.acquire(timeout=20), "a round was never allowed"
        pace.events.append("R")
        return round_()

    def pushed(self: Sequence, *arguments):
        push(self, *arguments)
        if self.budget == LONG.max_new_tokens:
            pace.events.append("P")

    monkeypatch.setattr(pool, "prefill", chunk)
    monkeypatch.setattr(pool, "round", rounds)
    monkeypatch.setattr(Sequence, "push", pushed)
    yield pace
    pace.allow()
    assert shared.close()


@pytest.fixture
def held(shared: AsyncEngine) -> Iterator[Callable[[], None]]:
    """The engine's thread is busy until this is called."""
    gate, inside = threading.Event(), threading.Event()
    shared.call(lambda engine: (inside.set(), gate.wait(60)))
    assert inside.wait(60)
    yield gate.set
    gate.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time now, in its only element; it stands still."""
    now = [1000.0]
    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(async_engine, "time", fake)
    monkeypatch.setattr(runner, "time", fake)
    return now


def test_an_answer_never_waits_for_more_than_a_chunk_between_two_rounds(shared, pace, right, micro_engine):
    """Two prompts of four chunks, one after the other, beside an answer under way."""
    answer = shared.submit(PROMPTS[0], LONG)
    pace.allow(1)
    first = next(iter(answer))
    others = [shared.submit(PROMPTS[5], PARAMS[5]) for _ in range(2)]
    pace.allow()
    assert all(same(other.result(), right[5]) for other in others)
    whole = answer.result()
    assert first.tokens + whole.tokens[len(first.tokens) :] == micro_engine.generate(PROMPTS[0], LONG).tokens
    told = "".join(pace.events)
    assert told.count("C") == 1 + 2 * 4
    between = [len(list(run)) for kind, run in groupby(told.replace("P", "")) if kind == "C"]
    assert max(between) == 1
    pieces = told[told.index("P") : told.rindex("P")].split("P")
    assert max(piece.count("C") for piece in pieces) <= 2 and max(piece.count("R") for piece in pieces) <= 2


def test_a_short_prompt_passes_a_long_one(shared, pace, right, held):
    """Both have a slot: the short one is not behind the long one's four chunks."""
    long, short = shared.submit(PROMPTS[5], PARAMS[5]), shared.submit(PROMPTS[0], PARAMS[0])
    pace.allow()
    held()
    assert same(short.result(), right[0]) and same(long.result(), right[5])
    assert "".join(pace.events).replace("P", "").startswith("CR")


def test_a_queue_that_is_full_refuses_at_once_and_loses_nobody(shared, right, held):
    """Two that could have a slot, and thirty that wait."""
    taken = [shared.submit(PROMPTS[0], PARAMS[0]) for _ in range(32)]
    for _ in range(3):
        with pytest.raises(QueueFull, match=r"^32 requests are waiting already; try again in 5 s$") as caught:
            shared.submit(PROMPTS[0], PARAMS[0])
        assert caught.value.retry_after == 5
    assert shared.load().waiting == 32
    held()
    assert all(same(running.result(), right[0]) for running in taken)
    assert same(shared.generate(PROMPTS[1], PARAMS[1]), right[1])


def test_a_deadline_ends_an_answer_with_what_there_is(shared, pace, clock, micro_engine):
    answer = shared.submit(PROMPTS[0], LONG, deadline=5)
    pieces = iter(answer)
    pace.allow(1)
    tokens = next(pieces).tokens
    pace.allow(3)
    tokens = tokens + next(pieces).tokens
    clock[0] += 5
    pace.allow(2)
    *_, last = pieces
    done = last.completion
    assert done.finish_reason == "deadline" and len(tokens) <= len(done.tokens) < 12
    assert done.tokens == micro_engine.generate(PROMPTS[0], LONG).tokens[: len(done.tokens)]


def test_a_deadline_ends_who_waits_and_nobody_else(shared, clock, right, held):
    running = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (1, 3)]
    late, patient = shared.submit(PROMPTS[0], PARAMS[0], deadline=5), shared.submit(PROMPTS[0], PARAMS[0], deadline=50)
    clock[0] += 5
    held()
    done = late.result()
    assert (done.tokens, done.text, done.finish_reason) == ([], "", "deadline")
    assert same(patient.result(), right[0])
    assert all(same(one.result(), right[at]) for one, at in zip(running, (1, 3), strict=True))


def test_cancelling_takes_a_round_at_most(shared, pace, micro_engine, drained):
    answer = shared.submit(PROMPTS[0], LONG)
    pieces = iter(answer)
    pace.allow(1)
    next(pieces)
    pace.allow(3)
    next(pieces)
    answer.cancel()
    answer.cancel()
    pace.allow(1)  # it may have been waited for
    *_, last = pieces
    done = last.completion
    assert done.finish_reason == "cancelled"
    assert done.tokens == micro_engine.generate(PROMPTS[0], LONG).tokens[: len(done.tokens)]
    assert pace.events.count("R") <= 5
    drained()


def test_who_waits_can_be_cancelled_and_so_can_who_is_dropped(shared, right, held, drained):
    """Nothing is computed for either of them."""
    before = shared.load().numbers["engine_tokens"]
    running = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (1, 3)]
    waiting, dropped = shared.submit(PROMPTS[0], PARAMS[0]), shared.submit(PROMPTS[0], LONG)
    waiting.cancel()
    del dropped
    held()
    done = waiting.result()
    assert (done.tokens, done.finish_reason) == ([], "cancelled")
    assert all(same(one.result(), right[at]) for one, at in zip(running, (1, 3), strict=True))
    drained()
    shared.call(lambda engine: None).result()
    assert shared.load().numbers["engine_tokens"] - before == len(right[1].tokens) + len(right[3].tokens)


def test_closing_cancels_what_runs_and_refuses_what_comes(shared, pace, micro_engine):
    answers = [shared.submit(PROMPTS[0], LONG) for _ in range(5)]
    pace.allow(1)
    first = next(iter(answers[0]))
    closing = threading.Thread(target=shared.close)
    closing.start()
    pace.allow()
    done = [answer.result() for answer in answers]
    closing.join(60)
    assert {one.finish_reason for one in done} == {"cancelled"}
    right = micro_engine.generate(PROMPTS[0], LONG).tokens
    assert all(one.tokens == right[: len(one.tokens)] for one in done) and done[0].tokens[:1] == first.tokens[:1]
    for use in (lambda: shared.submit([1], LONG), lambda: shared.call(lambda engine: None)):
        with pytest.raises(EngineStopped, match="^the engine is closed$"):
            use()
    assert shared.close()


def test_closing_may_wait_for_what_runs(shared, right, held):
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in range(6)]
    closing = threading.Thread(target=lambda: shared.close(drain=300))
    closing.start()
    held()
    assert all(map(same, (answer.result() for answer in answers), right))
    closing.join(60)
    assert not closing.is_alive()


def test_a_failing_round_is_told_to_those_in_it_and_nobody_else(shared, right, held, micro_drafting, monkeypatch):
    program, calls = micro_drafting.programs.decode_round, []

    def failing(*arguments):
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError("RESOURCE_EXHAUSTED\nof a card")
        return program(*arguments)

    monkeypatch.setattr(micro_drafting.programs, "decode_round", failing)
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (3, 4, 5, 7)]
    held()
    for answer in answers[:2]:
        with pytest.raises(AnswerLost, match=r"^the answer is lost: .* MemoryError: RESOURCE_EXHAUSTED; ask again$"):
            ended(answer)
    assert same(answers[2].result(), right[5]) and same(answers[3].result(), right[7])
    assert same(shared.generate(PROMPTS[3], PARAMS[3]), right[3])
    assert shared.load().numbers["engine_faults"] == 1


def test_a_failing_text_costs_its_own_answer(shared, right, held, monkeypatch):
    push = Sequence.push

    def failing(self, tokens, *arguments):
        if len(self.prompt) == len(PROMPTS[2]) and len(self.tokens) > 2:
            raise KeyError("text")
        push(self, tokens, *arguments)

    monkeypatch.setattr(Sequence, "push", failing)
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (2, 5, 7)]
    held()
    with pytest.raises(AnswerLost, match="KeyError: 'text'"):
        ended(answers[0])
    assert same(answers[1].result(), right[5]) and same(answers[2].result(), right[7])
    assert shared.load().numbers["engine_faults"] == 0


def test_numbers_that_fail_cost_nobody_anything(shared, right, micro_drafting, monkeypatch):
    def failing(*arguments, **options):
        raise ZeroDivisionError("numbers")

    with monkeypatch.context() as patch:
        patch.setattr(async_engine, "load_of", failing)
        answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in range(6)]
        assert all(map(same, (answer.result() for answer in answers), right))
        assert shared.call(lambda engine: 5).result() == 5
    assert set(micro_drafting.runner.faults) == {"ZeroDivisionError: numbers"}
    micro_drafting.runner.faults.clear()
    assert same(shared.generate(PROMPTS[1], PARAMS[1]), right[1])
    assert shared.call(lambda engine: 5).result() == 5  # a turn later: the answer is out before its own turn looks
    assert shared.load().numbers["engine_answers"] == 7 and not micro_drafting.runner.faults


class Broken:
    """A cache of prefixes that fails whatever it is asked."""

    counters = None

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def _fail(self, name: str):
        def ask(*arguments):
            self.asked.add(name)
            raise OSError(name)

        return ask

    def __getattr__(self, name: str):
        return self._fail(name)

    def close(self, save: bool) -> None:
        pass


def test_a_failing_cache_of_prefixes_costs_nobody_anything(shared, right, micro_drafting, monkeypatch):
    broken = Broken()
    monkeypatch.setattr(micro_drafting.runner, "prefixes", broken)
    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in range(6)]
    assert all(map(same, (answer.result() for answer in answers), right))
    shared.call(lambda engine: None).result()
    shared.close()
    assert broken.asked == {"give_way", "shared", "admitted", "appended", "ended", "idle"}
    assert {line.split(": ")[0] for line in micro_drafting.runner.faults} == {"OSError"}
    micro_drafting.runner.faults.clear()  # others use that engine


def test_a_device_that_is_gone_stops_the_engine_and_says_so(shared, held, micro_drafting, monkeypatch):
    def gone(*arguments):
        raise RuntimeError("INTERNAL: the card fell off the bus\nand more")

    answers = [shared.submit(PROMPTS[at], PARAMS[at]) for at in (3, 4, 5)]
    monkeypatch.setattr(async_engine, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))
    for name in ("prefill", "settle"):
        monkeypatch.setattr(micro_drafting.programs, name, gone)
    held()
    for answer in answers:
        with pytest.raises(AnswerLost, match=r"RuntimeError: INTERNAL: the card fell off the bus; ask again$"):
            ended(answer)
    said = r"^the engine has stopped: RuntimeError: INTERNAL: the card fell off the bus; load it again$"
    assert shared.close()
    for use in (lambda: shared.submit([1], LONG), lambda: shared.call(lambda engine: None)):
        with pytest.raises(EngineStopped, match=said):
            use()
