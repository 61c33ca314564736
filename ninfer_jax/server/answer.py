"""One answer on its way from the engine to a client: its events, its budget of reasoning, and how it ended."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ninfer_jax.server.backend import Backend, Busy, Running
from ninfer_jax.server.errors import ApiError, bad, too_long
from ninfer_jax.server.service import Service
from ninfer_jax.text import StopMatcher, Tokenizer, starts_in_reasoning
from ninfer_jax.text.reasoning import CLOSE
from ninfer_jax.text.tools.events import CallEnd, Event

if TYPE_CHECKING:
    from ninfer_jax.decoding import SamplingParams
    from ninfer_jax.engine.results import Completion, TokenLogprob

# What Qwen's own early-stopping recipe writes when reasoning has used up its budget.
OUT_OF_BUDGET = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n</think>\n\n"
)
UNCLOSED = "\n</think>\n\n"


class Parser(Protocol):
    """Turns an answer's reasoning and text into events; what they say together does not depend on how the text is cut."""

    def push(self, reasoning: str, text: str) -> list[Event]: ...
    def finish(self, truncated: bool) -> list[Event]: ...


@dataclass(frozen=True)
class Ask:
    """A request as the engine gets it.

    ids: the prompt. budget: reasoning tokens at most, None for no bound. parser: makes a new one for each answer. opener: text that
    the answer is made to begin with, after its reasoning. one_call: it ends with its first tool call. session, snapshots: see
    `Backend.submit`. arrived: `time.perf_counter()` when the request came.
    """

    ids: list[int]
    params: SamplingParams
    parser: Callable[[], Parser]
    budget: int | None = None
    opener: str | None = None
    one_call: bool = False
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
    """How an answer ended. finish: "stop", "length" or "tool_calls"; stop: the stop string that ended it, if one did."""

    finish: str
    stop: str | None
    usage: Usage


@dataclass(frozen=True)
class Step:
    """What one round of the engine added. The last step of an answer has its ending."""

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
    except Busy as busy:
        raise ApiError(429, str(busy), code="rate_limit_exceeded", retry_after=busy.retry_after) from None
    except ValueError as error:
        raise bad(str(error)) from None


class Answer:
    """One answer, submitted when it is made: ApiError for what is refused. `steps` runs once."""

    def __init__(self, service: Service, ask: Ask, route: str):
        self._service, self._ask, self._route = service, ask, route
        self._backend = service.engine
        self._params = ask.params
        self._tokenizer: Tokenizer = self._backend.text.tokenizer
        self._close = self._tokenizer.control_tokens.get(CLOSE)
        self._produced: list[int] = []
        self._thinking = starts_in_reasoning(ask.ids, self._tokenizer)
        self._reasoning_tokens = 0
        self._rescued = False
        self._parser = ask.parser()
        self._calls = 0
        self._cached = self._drafted = self._accepted = 0
        self._first: float | None = None
        self._prefill = 0.0
        self._opener = ask.opener
        self._opened: list[Event] = []
        if self._opener and not self._thinking:
            self._opened = self._parser.push("", self._opener)
            self._produced, self._opener = self._tokenizer.encode(self._opener, allow_special=True), None
        self._running = submit_checked(self._backend, ask, ask.ids + self._produced, self._limited())
        service.running += 1
        service.metrics.in_flight.inc()
        self._counted = True

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
            if self._opened:
                yield Step(self._opened)
            while True:
                forced = None
                async with aclosing(self._leg()) as leg:
                    async for step, wanted in leg:
                        forced = wanted
                        yield step
                if forced is None:
                    return
                yield Step(self._force(forced))
        finally:
            self.drop()

    async def _leg(self) -> AsyncGenerator[tuple[Step, str | None], None]:
        """Steps of one engine request, each with the text that has to be forced after it, if any, which ends the leg."""
        async for piece in self._running:
            if piece.tokens and self._first is None:
                self._first = time.perf_counter() - self._ask.arrived
            thought = self._thinking
            self._produced += piece.tokens
            self._count_reasoning(piece.tokens)
            done = piece.completion
            if thought and not self._thinking and self._opener:  # the reasoning has closed in this piece: drop what comes after
                behind = piece.tokens.index(self._close) + 1
                del self._produced[len(self._produced) - len(piece.tokens) + behind :]
                self._running.cancel()
                yield Step(self._parser.push(piece.reasoning, ""), piece.tokens[:behind], list(piece.logprobs[:behind])), ""
                return
            events = self._parser.push(piece.reasoning, piece.text)
            step = Step(events, piece.tokens, list(piece.logprobs))
            if done is not None:
                self._count(done.stats)
            if (
                self._ask.one_call
                and (first := next((i for i, e in enumerate(events) if isinstance(e, CallEnd)), None)) is not None
            ):
                self._running.cancel()
                yield replace(step, events=events[: first + 1], ending=self._ending("tool_calls", None)), None
                return
            self._calls += sum(isinstance(event, CallEnd) and event.complete for event in events)
            forced = self._needs(done)
            if done is None:
                yield step, forced
                if forced:
                    self._running.cancel()
                    return
            elif forced:
                if self._produced and self._produced[-1] in self._ends():
                    self._produced.pop()
                yield step, forced
                return
            else:
                yield self._last(done, step), None
                return
        raise ApiError(500, "the engine ended the answer without saying how")

    def _needs(self, done: Completion | None) -> str | None:
        """The text that closes the reasoning where the budget is used up, or where the model has ended its turn inside."""
        if not self._thinking or self._close is None or self._rescued:
            return None
        budget = self._ask.budget
        if budget is not None and self._reasoning_tokens >= budget and (done is None or done.finish_reason == "stop"):
            return OUT_OF_BUDGET
        if done is not None and done.finish_reason == "stop" and done.tokens and done.tokens[-1] in self._ends():
            return UNCLOSED
        return None

    def _force(self, text: str) -> list[Event]:
        """Goes on after forced text: what closes the reasoning, if it is open, and the answer's opener; their events."""
        if text:
            self._service.metrics.forced.labels("budget" if text is OUT_OF_BUDGET else "end_of_turn").inc()
            ids = self._tokenizer.encode(text, allow_special=True)
            self._reasoning_tokens += len(ids)
            self._produced += ids
        self._rescued, self._thinking = True, False
        events = self._parser.push(text.removesuffix(UNCLOSED), "")
        if self._opener:
            self._produced += self._tokenizer.encode(("" if text else "\n\n") + self._opener, allow_special=True)
            events += self._parser.push("", self._opener)
            self._opener = None
        prompt = self._ask.ids + self._produced
        if len(prompt) >= self._backend.context:
            raise ApiError(400, "thinking_budget: no room is left for an answer after the reasoning", param="thinking_budget")
        self._running = submit_checked(self._backend, self._ask, prompt, self._limited())
        return events

    def _limited(self) -> SamplingParams:
        """The settings for what is left of the answer."""
        limit = self._params.max_new_tokens
        return self._params if limit is None else replace(self._params, max_new_tokens=max(1, limit - len(self._produced)))

    def _count_reasoning(self, tokens: list[int]) -> None:
        if not self._thinking:
            return
        if self._close in tokens:
            self._reasoning_tokens += tokens.index(self._close) + 1
            self._thinking = False
        else:
            self._reasoning_tokens += len(tokens)

    def _count(self, stats: Any) -> None:
        self._cached = self._cached or getattr(stats, "cached_tokens", 0)
        self._drafted += stats.drafted
        self._accepted += stats.accepted
        self._prefill = self._prefill or stats.prefill_s

    def _ends(self) -> Sequence[int]:
        return self._backend.text.defaults.eos_ids

    def _last(self, done: Completion, step: Step) -> Step:
        """The step with what the parser still held, and the ending."""
        if done.finish_reason == "cancelled":
            raise ApiError(503, "the answer was stopped because the server is shutting down", code="shutting_down", retry_after=10)
        finish, stop = "length" if done.finish_reason == "length" else "stop", None
        held = self._parser.finish(finish == "length")
        self._calls += sum(isinstance(event, CallEnd) and event.complete for event in held)
        if finish == "stop" and self._params.stop and not (done.tokens and done.tokens[-1] in self._ends()):
            stop = matched_stop(self._params.stop, self._tokenizer, self._produced, self._close)
        if finish == "stop" and self._calls:
            finish = "tool_calls"
        return replace(step, events=step.events + held, ending=self._ending(finish, stop))

    def _ending(self, finish: str, stop: str | None) -> Ending:
        usage = Usage(len(self._ask.ids), self._cached, len(self._produced), self._reasoning_tokens)
        self._service.metrics.answered(self._record(usage, finish))
        return Ending(finish, stop, usage)

    def _record(self, usage: Usage, finish: str) -> dict[str, Any]:
        """Timings of the answer; no text."""
        return {
            "route": self._route,
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.completion,
            "reasoning_tokens": usage.reasoning,
            "finish_reason": finish,
            "first_token_s": self._first,
            "prefill_s": self._prefill,
            "total_s": time.perf_counter() - self._ask.arrived,
            "drafted": self._drafted,
            "accepted": self._accepted,
        }


def matched_stop(stops: Sequence[str], tokenizer: Tokenizer, tokens: list[int], close: int | None) -> str | None:
    """The stop string that ended an answer: the first in its text, after the reasoning if there was any."""
    start = tokens.index(close) + 1 if close in tokens else 0
    matcher = StopMatcher(stops)
    matcher.push(tokenizer.decode(tokens[start:]))
    return matcher.matched
