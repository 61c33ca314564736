"""One answer on its way from the engine to a client: its events, its budget of reasoning, and how it ended."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ninfer_jax.engine.results import AnswerLost, EngineStopped, QueueFull
from ninfer_jax.server.backend import Backend, Running
from ninfer_jax.server.errors import ApiError, bad, too_long
from ninfer_jax.server.service import Phase, Service
from ninfer_jax.text import IncrementalDecoder
from ninfer_jax.text.tools import CLOSE_REASONING, Event, Outcome

if TYPE_CHECKING:
    from ninfer_jax.decoding import SamplingParams
    from ninfer_jax.engine.results import Completion, TokenLogprob

# What Qwen's own early-stopping recipe writes when reasoning has used up its budget.
OUT_OF_BUDGET = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n</think>\n\n"
)


class Parser(Protocol):
    """The text of an answer into events, as `text.tools.AnswerParser` does it."""

    @property
    def done(self) -> bool: ...
    @property
    def in_reasoning(self) -> bool: ...
    @property
    def open_reasoning(self) -> bool: ...
    @property
    def outcome(self) -> Outcome | None: ...
    def push(self, text: str) -> list[Event]: ...
    def finish(self, cut: bool = False) -> list[Event]: ...


@dataclass(frozen=True)
class Ask:
    """A request as the engine gets it.

    ids: the prompt. params: without stop strings, which the parser looks for. parser: makes a new one for each answer. budget:
    reasoning tokens at most, None for no bound. prefix: what the answer is made to begin with, behind its reasoning. session,
    snapshots: see `Backend.submit`. arrived: `time.perf_counter()` when the request came.
    """

    ids: list[int]
    params: SamplingParams
    parser: Callable[[], Parser]
    budget: int | None = None
    prefix: str = ""
    session: str | None = None
    snapshots: tuple[int, ...] = ()
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, of those the cached ones, of the answer, and of those the reasoning."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


@dataclass(frozen=True)
class Ending:
    """The end of an answer. finish: "stop", "length" or "tool_calls"; stop: the stop string that ended it, if one did."""

    finish: str
    stop: str | None
    usage: Usage


@dataclass(frozen=True)
class Step:
    """Additions of one round of the engine. The last step of an answer has its ending."""

    events: list[Event]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None


def submit_checked(backend: Backend, ask: Ask, prompt: list[int], params: SamplingParams) -> Running:
    """The running request; what the engine refuses becomes an ApiError."""
    if len(prompt) >= backend.context:
        raise too_long(len(prompt), backend.context)
    try:
        return backend.submit(prompt, params, session=ask.session, snapshots=ask.snapshots)
    except QueueFull as full:
        raise ApiError(429, str(full), code="rate_limit_exceeded", retry_after=full.retry_after) from None
    except EngineStopped as stopped:
        raise ApiError(503, str(stopped), code="engine_stopped", retry_after=30) from None
    except ValueError as error:
        raise bad(str(error)) from None


def _shutting_down() -> ApiError:
    return ApiError(503, "the answer was stopped: the server is shutting down", code="shutting_down", retry_after=10)


class Answer:
    """One answer, submitted when it is made: ApiError for what is refused. `steps` runs once.

    It may take several requests of the engine, each going on where the last one ended: where reasoning has used up its budget or
    the model ended its turn inside, the server writes what closes it; and where a tool has to be called, the beginning of the call.
    The prefix cache has all that was computed.
    """

    def __init__(self, service: Service, ask: Ask, route: str, running: Running | None = None):
        """running: `ask`, submitted already."""
        self._service, self._ask, self._route = service, ask, route
        self._backend = service.engine
        self._tokenizer = self._backend.text.tokenizer
        self._parser = ask.parser()
        self._prefix = ask.prefix
        self._produced: list[int] = []
        self._reasoning_tokens = 0
        self._rescued = False
        self._cached = self._drafted = self._accepted = 0
        self._first: float | None = None
        self._prefill = 0.0
        self._begun: list[Event] = []
        if self._prefix and not self._parser.in_reasoning:
            self._begun = self._write_prefix()
        self._decoder, self._running = self._submit() if running is None else (self._fresh_decoder(), running)
        self._counted = True
        service.running += 1
        service.metrics.in_flight.inc()

    @classmethod
    async def open(cls, service: Service, ask: Ask, route: str) -> Answer:
        """The same, with a grammar compiled off the event loop."""
        if ask.params.grammar is None:
            return cls(service, ask, route)
        assert not ask.prefix, "a grammar forces what a prefix would begin"
        backend = service.engine
        running = await service.in_thread(lambda: submit_checked(backend, ask, ask.ids, ask.params))
        return cls(service, ask, route, running)

    def drop(self) -> None:
        """End it here, whatever it has come to."""
        self._running.cancel()
        if self._counted:
            self._counted = False
            self._service.running -= 1
            self._service.metrics.in_flight.dec()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Its steps; the last has the ending. ApiError if it cannot come to one."""
        try:
            if self._begun:
                yield Step(self._begun)
            while True:
                forced: str | None = None
                async with aclosing(self._leg()) as leg:
                    async for step, wanted in leg:
                        forced = wanted
                        yield step
                if forced is None:
                    return
                if not self._fits(forced):
                    yield Step(self._parser.finish(cut=True), ending=self._ending())
                    return
                yield Step(self._force(forced))
        except AnswerLost as lost:
            if self._service.phase is Phase.DRAINING:
                raise _shutting_down() from None
            raise ApiError(503, str(lost), code="answer_lost", retry_after=1) from None
        finally:
            self.drop()

    async def _leg(self) -> AsyncGenerator[tuple[Step, str | None], None]:
        """Steps of one engine request, each with what has to be written after it: None for nothing; anything else ends the leg."""
        async for piece in self._running:
            if piece.tokens and self._first is None:
                self._first = time.perf_counter() - self._ask.arrived
            events, used, forced = self._read(piece.tokens)
            done = piece.completion
            if done is not None:
                self._count(done)
            step = Step(events, piece.tokens[:used], list(piece.logprobs[:used]))
            if forced is None and not self._parser.done:
                if done is None:
                    yield step, None
                    continue
                if done.finish_reason == "cancelled":
                    raise _shutting_down()
                if done.finish_reason == "grammar":
                    raise ApiError(400, f"the answer cannot go on under its grammar: {done.error}", code="grammar_limit")
                forced = self._after_end(done, events)
            self._running.cancel()
            if forced is None:
                cut = done is not None and done.finish_reason == "length"
                yield replace(step, events=events + self._parser.finish(cut), ending=self._ending()), None
            else:
                yield step, forced
            return
        if self._service.phase is Phase.DRAINING:
            raise _shutting_down()
        raise ApiError(500, "the engine ended the answer without saying how")

    def _read(self, tokens: list[int]) -> tuple[list[Event], int, str | None]:
        """(events of a round's tokens, how many of them were taken, what has to be written after those)."""
        events: list[Event] = []
        for at, token in enumerate(tokens):
            thinking = self._parser.in_reasoning
            self._produced.append(token)
            self._service.metrics.tokens += 1
            self._reasoning_tokens += thinking
            events += self._parser.push(self._decoder.push([token]))
            if self._parser.done:
                return events, at + 1, None
            if thinking and not self._parser.in_reasoning and self._prefix:
                return events, at + 1, ""
            used_up = self._ask.budget is not None and self._reasoning_tokens >= self._ask.budget and not self._rescued
            if used_up and self._parser.in_reasoning and token not in self._backend.text.defaults.eos_ids:
                return events, at + 1, OUT_OF_BUDGET
        return events, len(tokens), None

    def _after_end(self, done: Completion, events: list[Event]) -> str | None:
        """The text to write where the model ended its turn inside its reasoning, for the first time; else None."""
        events += self._parser.push(self._decoder.flush())
        if done.finish_reason == "length" or self._rescued or self._parser.done or not self._parser.open_reasoning:
            return None
        if self._produced and self._produced[-1] in self._backend.text.defaults.eos_ids:
            self._produced.pop()
        return CLOSE_REASONING

    def _fits(self, text: str) -> bool:
        """Whether `max_new_tokens` leaves room for a token behind what would be written."""
        most = self._ask.params.max_new_tokens
        ids = self._tokenizer.encode(text + self._prefix, allow_special=True)
        return most is None or len(self._produced) + len(ids) < most

    def _force(self, text: str) -> list[Event]:
        """Goes on after text that the server writes, and after the prefix of a call that has to come; their events."""
        events: list[Event] = []
        if text:
            self._rescued = True
            self._service.metrics.forced.labels("budget" if text is OUT_OF_BUDGET else "end_of_turn").inc()
            ids = self._tokenizer.encode(text, allow_special=True)
            self._reasoning_tokens += len(ids)
            self._produced += ids
            events += self._parser.push(text)
        if self._prefix:
            events += self._write_prefix("" if text else "\n\n")
        if len(self._ask.ids) + len(self._produced) >= self._backend.context:
            raise ApiError(400, "thinking_budget: no room is left for an answer after the reasoning", param="thinking_budget")
        self._decoder, self._running = self._submit()
        return events

    def _write_prefix(self, before: str = "") -> list[Event]:
        text, self._prefix = before + self._prefix, ""
        self._produced += self._tokenizer.encode(text, allow_special=True)
        return self._parser.push(text)

    def _submit(self) -> tuple[IncrementalDecoder, Running]:
        """The engine at work on all that there is so far."""
        prompt, params = self._ask.ids + self._produced, self._ask.params
        if params.max_new_tokens is not None:
            params = replace(params, max_new_tokens=max(1, params.max_new_tokens - len(self._produced)))
        return self._fresh_decoder(), submit_checked(self._backend, self._ask, prompt, params)

    def _fresh_decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self._tokenizer, after=self._ask.ids + self._produced)

    def _count(self, done: Completion) -> None:
        self._cached = self._cached or getattr(done.stats, "cached_tokens", 0)
        self._drafted += done.stats.drafted
        self._accepted += done.stats.accepted
        self._prefill = self._prefill or done.stats.prefill_s

    def _ending(self) -> Ending:
        outcome = self._parser.outcome
        assert outcome is not None, "finish was called"
        usage = Usage(len(self._ask.ids), self._cached, len(self._produced), self._reasoning_tokens)
        self._service.metrics.answered(
            {
                "route": self._route,
                "prompt_tokens": usage.prompt,
                "cached_tokens": usage.cached,
                "completion_tokens": usage.completion,
                "reasoning_tokens": usage.reasoning,
                "finish_reason": outcome.reason,
                "first_token_s": self._first,
                "prefill_s": self._prefill,
                "total_s": time.perf_counter() - self._ask.arrived,
                "drafted": self._drafted,
                "accepted": self._accepted,
            }
        )
        return Ending(outcome.reason, outcome.stop, usage)
