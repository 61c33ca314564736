"""An exception at any line of the driver and out of any program: it gets through as it is, nothing leaks, nothing hangs, and what
is answered afterwards is right."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import jax
import numpy as np
import pytest

import ninfer_jax
from ninfer_jax import Engine, SamplingParams
from ninfer_jax.engine import AnswerLost
from ninfer_jax.engine.runner import Runner
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.text import StopMatcher

PACKAGE = Path(ninfer_jax.__file__).parent
DRIVER = {str(PACKAGE / "engine" / f"{name}.py") for name in ("engine", "runner", "scheduler", "sequence", "slot_pool")}
DRIVER.add(str(PACKAGE / "state" / "pages.py"))
CONTEXT, PAGES = 256, 8  # of a slot; of two
LENGTHS = (70, 3, 20, 64)
PROMPTS = [np.random.default_rng(seed).integers(0, 1000, length).tolist() for seed, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)
PARAMS = (GREEDY, GREEDY, GREEDY, replace(GREEDY, max_new_tokens=60))


class Struck(KeyboardInterrupt):
    """What a signal raises, told apart from a real one."""


@pytest.fixture
def engine(micro_drafting) -> Engine:
    return micro_drafting


@pytest.fixture(scope="module")
def right(micro_drafting) -> list[list[int]]:
    """Each prompt's greedy tokens, alone on an engine that nothing has happened to; of the last one a long answer."""
    tokens = [micro_drafting.generate(prompt, params).tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert len({tuple(t[:5]) for t in tokens}) == len(PROMPTS), "answers that do not tell prompts apart prove nothing"
    return tokens


@pytest.fixture(autouse=True)
def no_hang(monkeypatch) -> None:
    """A request that goes on for ever fails instead."""
    advance = Runner.advance

    def counted(self: Runner, *arguments: object) -> None:
        counted.calls += 1
        assert counted.calls < 100_000, "a request never ends"
        advance(self, *arguments)

    counted.calls = 0
    monkeypatch.setattr(Runner, "advance", counted)


class Reader:
    """A stream, what it must say, and what it has said."""

    def __init__(self, engine: Engine, prompt: int, right: list[int], on_prefill: Callable[[int, int], None] | None = None):
        self._right, self._text = right, engine.tokenizer.decode(right)
        # Its last character begins a stop string: it is held back to the very end.
        params = replace(PARAMS[prompt], stop=(self._text[-1] + "and on",))
        self._stream = engine.stream(PROMPTS[prompt], params, on_prefill=on_prefill)
        self.tokens: list[int] = []
        self.text = self.end = ""

    def read(self, pieces: int = 1_000) -> None:
        if self.end == "complete":
            return
        self.end = "raised"  # unless what comes out says otherwise
        for _ in range(pieces):
            piece = next(self._stream, None)
            if piece is None:
                self.end = "nothing more, and no completion"
                break
            self.tokens += piece.tokens
            self.text += piece.text
            if piece.completion is not None:
                assert self.tokens == piece.completion.tokens == self._right and piece.completion.finish_reason == "length"
                assert self.text == piece.completion.text == self._text
                self.end = "complete"
                return
        else:
            self.end = ""

    def close(self) -> None:
        self.end = "closed"
        self._stream.close()

    def finish(self) -> None:
        """To its end, or to where it says that it is lost; nothing it has said is wrong."""
        if not self.end:
            try:
                self.read()
            except AnswerLost as error:
                assert "ask again" in str(error) and "\n" not in str(error)
                self.end = "lost"
        assert self.end in ("complete", "closed", "lost", "raised")
        assert self.tokens == self._right[: len(self.tokens)]


class Day:
    """All that the driver does: streams read alternately, one that waits, one left early, scores, batches and callbacks."""

    def __init__(self, engine: Engine, right: list[list[int]]):
        self._engine, self._right = engine, right
        self.readers: list[Reader] = []

    def stream(self, prompt: int, on_prefill: Callable[[int, int], None] | None = None) -> Reader:
        self.readers.append(Reader(self._engine, prompt, self._right[prompt], on_prefill))
        return self.readers[-1]

    def run(self) -> None:
        first, second = self.stream(0, lambda done, total: None), self.stream(1)
        first.read(1), second.read(1), first.read(1)
        third = self.stream(2)
        third.read(1), second.read(), first.read()
        left = self.stream(3)
        left.read(1)
        left.close()
        third.read()
        self._engine.score(PROMPTS[0])
        answers = self._engine.generate_many(PROMPTS[:3], [GREEDY, replace(GREEDY, logprobs=1), GREEDY])
        assert [answer.tokens for answer in answers] == self._right[:3]


def assert_as_new(engine: Engine, right: list[list[int]], context: str) -> None:
    """The next requests are answered right, and then every slot and every page can be had again."""
    for prompt in (1, 0):
        assert engine.generate(PROMPTS[prompt], GREEDY).tokens == right[prompt], context
    runner = engine.runner
    assert runner.busy == 0 and runner.free_tokens == runner.pool_tokens == PAGES * 64, context
    with runner.lease(CONTEXT) as one, runner.lease(CONTEXT) as other:
        assert sorted([*one.table.tolist(), *other.table.tolist()]) == list(range(1, PAGES + 1)), context
        assert {one.slot, other.slot} == {0, 1} and runner.free_tokens == 0, context


_told: Callable[[str, int], None]


def _inside(frame: FrameType, event: str, _: object) -> Callable | None:
    if event == "line":
        _told(frame.f_code.co_filename, frame.f_lineno)
    return _inside


def _outside(frame: FrameType, event: str, _: object) -> Callable | None:
    return _inside if frame.f_code.co_filename in DRIVER else None


@contextmanager
def tracing(told: Callable[[str, int], None]) -> Iterator[None]:
    """Calls `told(file, line)` before each line of the driver; what it raises is raised there."""
    global _told
    _told = told
    # Functions of the module: Python 3.11 may still call one that it has freed, after it has raised (seen with a local one).
    sys.settrace(_outside)
    try:
        yield
    finally:
        sys.settrace(None)


def after(engine: Engine, right: list[list[int]], day: Day, struck: BaseException | None, context: str) -> None:
    try:
        for reader in day.readers:
            reader.finish()
        assert_as_new(engine, right, context)
    except BaseException as error:
        error.add_note(f"after {struck!r} at {context}")
        raise


# What strikes in a finalizer is dropped by Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("each", [1, pytest.param(5, marks=pytest.mark.full)], ids=["once", "five times"])
@pytest.mark.long
def test_an_interrupt_at_every_line_of_the_driver(engine, right, each: int):
    """At one of the times that a day comes past it, now an early and now a late one; or at several of them."""
    assert_as_new(engine, right, "before")
    times: dict[tuple[str, int], int] = defaultdict(int)

    def count(file: str, line: int) -> None:
        times[file, line] += 1

    with tracing(count):
        Day(engine, right).run()
    assert {file for file, _ in times} == DRIVER
    spread = (0.0, 1.0, 0.5, 0.2, 0.8)
    cases = [
        (*place, 1 + int(share * (many - 1)))
        for at, (place, many) in enumerate(sorted(times.items()))
        for share in [spread[(at + more) % 5] for more in range(each)]
    ]
    assert len(cases) > 200
    came_out = 0
    for file, line, time in cases:
        struck, left, day = Struck(), time, Day(engine, right)

        def strike(at_file: str, at_line: int, place=(file, line), struck=struck) -> None:
            nonlocal left
            left -= (at_file, at_line) == place
            if left == 0:
                left = -1
                raise struck

        context = f"{Path(file).name}:{line}, time {time}"
        try:
            with tracing(strike):
                day.run()
        except Struck as error:
            assert error is struck
            came_out += 1
        after(engine, right, day, struck, context)
    # A line may be reached less often than the first time: finalizers run when they like.
    assert came_out > 0.98 * len(cases)


FAILURES = (KeyboardInterrupt, MemoryError, lambda: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nof a card"))


class Unreadable:
    """The tokens of a round that has failed on the device: one learns of it when they are read."""

    def __init__(self, error: BaseException):
        self._error = error

    def __array__(self, *arguments: object, **options: object) -> np.ndarray:
        raise self._error


CALLS = [(name, when) for name in ("admit", "release", "prefill", "begin", "decode_round", "head") for when in ("before", "after")]


@pytest.mark.parametrize("name, when", [*CALLS, ("begin", "read"), ("decode_round", "read"), ("head", "read")])
def test_a_failing_program(engine, right, monkeypatch, name: str, when: str):
    """Before it has taken the state, after it has, and when its result is read; at its first calls, and later."""
    program = getattr(engine.programs, name)
    for at in (1, 2, 4, 11):
        error, calls, day = FAILURES[at % 3](), 0, Day(engine, right)

        def failing(*arguments: object, at=at, error=error):
            nonlocal calls
            calls += 1
            if calls == at and when == "before":
                raise error
            result = program(*arguments)
            if calls == at and when == "after":
                raise error
            if calls == at and name == "head":
                return Unreadable(error)
            return (result[0], result[1]._replace(tokens=Unreadable(error))) if calls == at else result

        with monkeypatch.context() as patch:
            patch.setattr(engine.programs, name, failing)
            try:
                day.run()
            except type(error) as caught:
                assert caught is error
            else:
                assert calls < at and at > 2, "not every failure came out"
        after(engine, right, day, error, f"{name}, call {at}, {when}")


def test_a_failing_allocation_is_tried_again(engine, right, monkeypatch):
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "decode_round", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
        for error in (MemoryError(), KeyboardInterrupt()):

            def failing(error=error):
                raise error

            patch.setattr(engine.programs, "allocate", failing)
            with pytest.raises(type(error)) as caught:
                engine.generate(PROMPTS[1], GREEDY)
            assert caught.value is error
    assert_as_new(engine, right, "allocate")


def test_others_are_told_that_they_are_lost_and_who_waits_is_answered(engine, right, monkeypatch):
    running = [engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)]
    for stream in running:
        next(stream)
    sequence = Sequence(PROMPTS[2], GREEDY, GREEDY.max_new_tokens, 0, (), engine.tokenizer)
    engine.runner.submit(sequence)
    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "decode_round", lambda *_: [].pop())
        with pytest.raises(IndexError):
            next(running[0])
    assert engine.runner.busy == 0
    with pytest.raises(AnswerLost, match=r"^the answer is lost: the engine was stopped at work by IndexError: pop from"):
        next(running[1])
    while not sequence.finished:
        engine.runner.advance()
    assert sequence.tokens == right[2] and sequence.finish_reason == "length"
    assert_as_new(engine, right, "after a failing round")


def test_an_answer_that_is_interrupted_at_its_very_end_is_lost_not_cut(engine, right, monkeypatch):
    first, second = Reader(engine, 0, right[0]), Reader(engine, 1, right[1])
    first.read(1), second.read(1)
    flush, calls = StopMatcher.flush, []

    def interrupted(self: StopMatcher) -> str:
        calls.append(self)
        if len(calls) == 1:  # the first stream's, in the second one's call
            raise Struck
        return flush(self)

    with monkeypatch.context() as patch:
        patch.setattr(StopMatcher, "flush", interrupted)
        with pytest.raises(Struck):
            second.read()
    first.finish()
    assert first.end == "lost"
    assert_as_new(engine, right, "at its end")


@pytest.mark.parametrize("error", FAILURES[:2], ids=lambda e: e.__name__)
def test_a_failing_score_costs_nobody_else_anything(engine, right, error, monkeypatch):
    """What fails reads nothing of the state. A second one finds its slot free."""
    other = Reader(engine, 1, right[1])
    other.read(1)
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(engine.programs, "head", lambda *arguments: Unreadable(error("scored")))
            engine.score(PROMPTS[0])
    assert engine.runner.busy == 1
    other.read()
    assert other.end == "complete"
    assert_as_new(engine, right, "score")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError], ids=lambda e: e.__name__)
@pytest.mark.parametrize("chunk", [64, 70])
def test_a_failing_callback_costs_nobody_else_anything(engine, right, error, chunk):
    other = Reader(engine, 1, right[1])
    other.read(1)
    raised = error("mine")

    def fail(done: int, total: int) -> None:
        if done == chunk:
            raise raised

    with pytest.raises(error) as caught:
        engine.generate(PROMPTS[0], GREEDY, on_prefill=fail)
    assert caught.value is raised
    assert engine.runner.busy == 1
    other.read()
    assert other.end == "complete"
    assert_as_new(engine, right, "callback")


def test_a_callback_may_use_the_engine(engine, right):
    inner = []

    def ask(done: int, total: int) -> None:
        inner.append(engine.generate(PROMPTS[2], GREEDY).tokens)

    assert engine.generate(PROMPTS[0], GREEDY, on_prefill=ask).tokens == right[0]
    assert inner == [right[2]]  # in whose course the second chunk was prefilled too
    assert_as_new(engine, right, "nested")


def test_a_cancelled_sequence_says_so(engine, right):
    waiting, running = (Sequence(PROMPTS[0], GREEDY, 100, 0, (), engine.tokenizer) for _ in range(2))
    engine.runner.submit(running)
    while not running.tokens:
        engine.runner.advance()
    engine.runner.submit(waiting)
    for sequence in (running, waiting):
        engine.runner.cancel(sequence)
        engine.runner.cancel(sequence)
        assert sequence.finish_reason == "cancelled"
    assert running.tokens and not waiting.tokens
    assert_as_new(engine, right, "cancelled")


def test_cancelling_that_is_interrupted_is_made_good(engine, right, monkeypatch):
    sequence = Sequence(PROMPTS[0], GREEDY, 100, 0, (), engine.tokenizer)
    engine.runner.submit(sequence)
    engine.runner.advance()
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "cancel", lambda self, reason: [].pop())
        with pytest.raises(IndexError):
            engine.runner.cancel(sequence)
    assert engine.runner.busy == 0
    assert_as_new(engine, right, "cancelled")
    assert sequence.finish_reason == "cancelled"


@pytest.mark.parametrize("call", ["step", "snapshot", "restore"])
def test_leases_that_leave_no_room(engine, right, call, monkeypatch):
    """A request that could wait for ever is refused; a lease that is dropped, ended or lost is no obstacle."""
    one, two = engine.runner.lease(10), engine.runner.lease(10)
    with pytest.raises(ValueError, match="no slot or not enough pages are free: end the leases"):
        engine.generate(PROMPTS[1], GREEDY)
    with pytest.raises(ValueError, match="no slot or not enough pages are free"):
        engine.runner.lease(10)
    with pytest.raises(ValueError, match="11 tokens after 0 are more than the 10"):
        list(one.prefill(range(11)))
    two.end()
    assert engine.generate(PROMPTS[1], GREEDY).tokens == right[1]
    with pytest.raises(ValueError, match="given back"):
        list(two.prefill([1]))
    given = {"step": (1,), "snapshot": (), "restore": (one.snapshot(), [])}[call]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.programs, call, lambda *arguments: 1 / 0)
        getattr(one, call)(*given)
    with pytest.raises(AnswerLost, match="ZeroDivisionError"):
        list(one.prefill([1]))
    two = engine.runner.lease(CONTEXT)
    del two
    assert_as_new(engine, right, "leases")


def test_a_request_that_never_fits_is_refused_at_once(engine, right):
    with pytest.raises(ValueError, match="may take 270 tokens together, the page pool holds 256"):
        engine.runner.submit(Sequence(PROMPTS[0], GREEDY, 200, 0, (), engine.tokenizer))
    assert_as_new(engine, right, "refused")
