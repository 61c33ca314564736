"""The engine for many callers: requests from any thread or event loop, one thread that owns the device."""

from __future__ import annotations

import atexit
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ninfer_jax.cache import Counters
from ninfer_jax.config import EngineConfig
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine.channel import Channel
from ninfer_jax.engine.engine import Engine
from ninfer_jax.engine.load import Load, load_of
from ninfer_jax.engine.requests import Prompt
from ninfer_jax.engine.results import AnswerLost, Completion, Delta, EngineStopped, QueueFull, first_line
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.planning.choose import Choice
from ninfer_jax.planning.kept import mode_of
from ninfer_jax.text import CheckpointText

T = TypeVar("T")
PROBES = 3  # fresh states that have to fail, one after another, before the device counts as gone


@dataclass(eq=False)
class _Ticket:
    """A request as the engine's thread knows it; it does not know the reader."""

    sequence: Sequence
    channel: Channel = field(default_factory=Channel)
    unwanted: bool = False


class Running:
    """One request: its pieces, once, by `for` or `async for`; the last has the completion. Whoever drops it cancels it."""

    def __init__(self, ticket: _Ticket):
        self._ticket = ticket

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._ticket.sequence.prompt)

    @property
    def prefilled(self) -> int:
        """Tokens of the prompt that are in its slot by now."""
        return self._ticket.sequence.prefilled

    def cancel(self) -> None:
        """End it within a round, with what there is: `finish_reason` "cancelled". Does nothing if it has ended."""
        self._ticket.unwanted = True

    def __iter__(self) -> Iterator[Delta]:
        """Its pieces. AnswerLost if it cannot come to its end through no fault of its own."""
        channel, done = self._ticket.channel, False
        while not done:
            channel.wait()
            if (piece := channel.take()) is not None:
                done = piece.completion is not None
                yield piece

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Its pieces, as for `for`."""
        channel, done = self._ticket.channel, False
        while not done:
            await channel.wait_async()
            if (piece := channel.take()) is not None:
                done = piece.completion is not None
                yield piece

    def result(self) -> Completion:
        """The whole answer, waited for. AnswerLost as for its pieces."""
        return _last(list(self))

    async def wait(self) -> Completion:
        """The same in an event loop."""
        return _last([piece async for piece in self])

    def __del__(self) -> None:
        self.cancel()


class AsyncEngine:
    """An engine that many use at a time. It takes over `engine`, which nobody else may call from then on.

    Each method may be called from any thread. One thread of its own has the device: each turn it gives slots to those who wait,
    appends a chunk of a prompt and reads a round, while the next round is at work already. queue: requests that may wait at a time
    beside those that have slots.

    An exception in that thread ends what it has made impossible with AnswerLost, and the engine goes on with a fresh state; where
    not even that can be had, it stops, and says so to whoever comes.
    """

    def __init__(self, engine: Engine, *, queue: int = 64):
        if queue < 0:
            raise ValueError(f"queue is {queue}, must be 0 or more")
        self._engine, self._runner = engine, engine.runner
        self._room = engine.programs.shape.slots + queue
        self._changed = threading.Condition()
        # Guarded by it: all that others hand in, and the requests under way.
        self._inbox: deque[_Ticket] = deque()
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._under_way: list[_Ticket] = []
        self._closing: float | None = None  # when running requests are cancelled
        self._save = True
        self._stopped: str | None = None  # why nothing more is taken
        self._answers = self._faults = 0
        self._load = load_of(self._runner)
        self._thread = threading.Thread(target=self._run, name="ninfer-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside JAX would crash an interpreter that ends

    @classmethod
    def open(cls, model: str | Path, config: EngineConfig | None = None, *, queue: int = 64, **options: Any) -> AsyncEngine:
        """The engine of a model, with a prefix cache unless `config` says otherwise; model, options: of `Engine.load`, which says
        what is refused."""
        config = config or EngineConfig()
        config = dataclasses.replace(config, prefix_cache=mode_of(config, many=True))
        return cls(Engine.load(model, config, **options), queue=queue)

    @property
    def text(self) -> CheckpointText:
        """Tokenizer, chat template and defaults of the model."""
        return self._engine.requests.text

    @property
    def context(self) -> int:
        """Tokens that prompt and answer of one request may have together."""
        return self._engine.context

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each setting of the model's files that has no effect here."""
        return self._engine.notes

    @property
    def choice(self) -> Choice | None:
        """The configuration that it runs in, and what of it was chosen."""
        return self._engine.choice

    @property
    def prefix_counters(self) -> Counters | None:
        """Counters of the prefix cache since the engine started, as they stand; None where there is none."""
        return self._engine.prefix_counters

    def default_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling defaults, with `changes` on top."""
        return self._engine.default_params(**changes)

    def describe(self) -> dict[str, Any]:
        """Device, capacities and formats of the engine."""
        shape = self._engine.programs.shape
        return {
            "device": self._engine.device,
            "context": shape.context,
            "slots": shape.slots,
            "pool_tokens": shape.pool_tokens,
            "kv": shape.kv,
            "draft": shape.draft,
            "dtype": str(shape.dtype),
            "prefix_cache": self._engine.prefix_cache,
        }

    def load(self) -> Load:
        """The engine as it was after its last turn. Costs it nothing."""
        return dataclasses.replace(self._load, waiting=self._load.waiting + len(self._inbox))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        deadline: float | None = None,
        session: str | None = None,
        snapshots: SequenceOf[int] = (),
        **template_options: Any,
    ) -> Running:
        """The request, queued. Template and tokenizer run in the caller's thread.

        params: None takes the model's defaults. deadline: seconds from now after which it ends with what there is, `finish_reason`
        "deadline", also if it still waits. session: the same for all requests of one conversation. snapshots: prompt lengths that
        are worth a cache entry. template_options: as for `Engine.generate`. ValueError for what cannot be computed, QueueFull,
        EngineStopped.
        """
        if deadline is not None and not deadline > 0:  # NaN is not
            raise ValueError(f"deadline: {deadline:g} s from now is in the past")
        ends = None if deadline is None or math.isinf(deadline) else time.monotonic() + deadline
        self._check_open()
        sequence = self._engine.requests.sequence(prompt, params, template_options)
        sequence.deadline, sequence.session, sequence.snapshots = ends, session, tuple(snapshots)
        sequence.stats.kv_bytes_per_token = self._engine.kv_bytes_per_token
        ticket = _Ticket(sequence)
        with self._changed:
            self._check_open()
            if len(self._inbox) + len(self._under_way) >= self._room:
                raise QueueFull(self.load().waiting)
            self._inbox.append(ticket)
            self._changed.notify()
        return Running(ticket)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer, waited for; options: of `submit`."""
        return self.submit(prompt, params, **options).result()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """The result of `function(engine)`, run between two turns in the thread that has the device: scoring, for instance. Answers
        wait meanwhile."""
        future: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def close(self, save: bool = True, *, drain: float = 0.0, timeout: float = 60.0) -> bool:
        """End: nothing more is taken, what runs has `drain` seconds and is cancelled then, the cache is saved if `save`. Whether
        that was done within `timeout` seconds more."""
        with self._changed:
            if self._closing is None:
                self._save = save
            ends = time.monotonic() + drain
            self._closing = ends if self._closing is None else min(ends, self._closing)
            self._changed.notify()
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(drain + timeout)
        atexit.unregister(self.close)
        return not self._thread.is_alive()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._stopped is not None:
            raise EngineStopped(self._stopped)
        if self._closing is not None:
            raise EngineStopped("the engine is closed")

    # From here on: the engine's thread.

    def _run(self) -> None:
        self._runner.owner = threading.get_ident()
        why, cause = "the engine is closed", "its end"
        try:
            while self._await_work():
                self._one_turn()
            self._runner.prefixes.close(self._save)
        except BaseException as error:
            cause = first_line(error)
            why = f"the engine has stopped: {cause}; load it again"
        self._runner.owner = None
        with self._changed:
            self._stopped = why
            left, calls = [*self._under_way, *self._inbox], list(self._calls)
            self._under_way, self._inbox, self._calls = [], deque(), deque()
        for ticket in left:
            self._cancel(ticket.sequence)
            ticket.channel.fail(AnswerLost(cause))
        for _, future in calls:
            future.set_exception(EngineStopped(why))

    def _await_work(self) -> bool:
        """Take in what has come; while there is nothing to do, wait. False if the engine is to end."""
        more = True
        while True:
            with self._changed:
                while not (more or self._inbox or self._calls or self._under_way or self._closing is not None):
                    self._changed.wait()
                arrived, calls, closing = list(self._inbox), list(self._calls), self._closing
                self._inbox.clear()
                self._calls.clear()
                self._under_way += arrived
            for ticket in arrived:
                try:
                    self._runner.submit(ticket.sequence)
                except Exception as error:
                    ticket.sequence.lose(first_line(error))
            for function, future in calls:
                _answer(lambda f=function: f(self._engine), future)
            over = closing is not None and time.monotonic() >= closing
            for ticket in self._under_way:
                if ticket.unwanted or over:
                    self._cancel(ticket.sequence)
            if self._under_way:
                return True
            if closing is not None:
                return False
            more = self._idle()

    def _one_turn(self) -> None:
        life, worked = self._runner.pool.life, True
        try:
            worked = self._runner.turn()
            self._hand_on()
            self._runner.finish()
        except Exception as error:
            self._faults += 1
            self._recover(life, error)
        self._look()
        if not worked and self._under_way:
            with self._changed:
                self._changed.wait(0.02)  # a lease of some call is in the way

    def _look(self) -> None:
        try:
            self._load = load_of(self._runner, answers=self._answers, faults=self._faults)
        except Exception as error:  # numbers for a dashboard are worth no answer: those of the turn before stay
            self._runner.faults.append(first_line(error))

    def _recover(self, life: object, error: Exception) -> None:
        """After an exception: who holds a slot is lost. Raises what a fresh state raises, if not even that can be had."""
        if self._runner.pool.life is life:
            live = self._runner.live
            for sequence in [s for s in live if s.lease is not None] or live:
                sequence.lose(first_line(error))
            return
        for left in reversed(range(PROBES)):
            try:
                self._runner.settle()
                break
            except Exception:
                if not left:
                    raise
                time.sleep(0.1)

    def _hand_on(self) -> None:
        """Give each reader what there is for it."""
        ended = set()
        for ticket in self._under_way:
            sequence = ticket.sequence
            if sequence.finished:
                sequence.stats.compilations = self._engine.compilations
                ended.add(ticket)
            try:
                piece = sequence.take()
            except AnswerLost as error:
                ticket.channel.fail(error)
                continue
            if piece and not ticket.channel.put(piece):
                ticket.unwanted = True
        self._answers += len(ended)
        if ended:
            with self._changed:
                self._under_way = [ticket for ticket in self._under_way if ticket not in ended]

    def _cancel(self, sequence: Sequence) -> None:
        try:
            self._runner.cancel(sequence)
        except Exception as error:  # of its text
            sequence.lose(first_line(error))

    def _idle(self) -> bool:
        try:
            return self._runner.idle()
        except Exception as error:  # it has cost the state, in which nobody was
            self._runner.faults.append(first_line(error))
            return False


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


def _last(pieces: list[Delta]) -> Completion:
    completion = pieces[-1].completion
    assert completion is not None  # otherwise an exception has come
    return completion
