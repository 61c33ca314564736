"""One request on its way through the engine: its prompt, what was generated, and how that becomes text."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine.results import AnswerLost, Completion, Delta, Stats, TokenLogprob
from ninfer_jax.engine.slot_pool import Lease
from ninfer_jax.text import IncrementalDecoder, ReasoningSplitter, StopMatcher, Tokenizer, starts_in_reasoning
from ninfer_jax.text.guide import Guide


@dataclass(eq=False)
class Sequence:
    """Host side of a sequence. `budget`: tokens it may emit; `seed`: of its draws; `end_ids`: tokens that end it; `guide`: its way
    through its grammar, None without one.

    lease: its slot, None while it waits. started: its prefill has. begun: its first token is drawn, or being drawn. reader: the
    generator that hands its pieces on, None if nobody does; once that has ended nobody waits for the sequence any more. deadline:
    `time.monotonic()` at which it ends, whatever it has come to. exact: the slot has stopped where the answer stops; it goes on
    behind a stop string.

    session, snapshots, marks: for a cache of prefixes: the conversation it belongs to, prompt lengths that the caller wants kept,
    and rising multiples of 64 at which a chunk of the prompt has to end. served, overtaken: the scheduler's.
    """

    prompt: list[int]
    params: SamplingParams
    budget: int
    seed: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer
    guide: Guide | None = None
    stats: Stats = field(default_factory=Stats)
    lease: Lease | None = None
    prefilled: int = 0
    started: bool = False
    begun: bool = False
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    lost_to: str | None = None
    error: str = ""
    reader: weakref.ref[Generator[Any, None, None]] | None = None
    deadline: float | None = None
    exact: bool = False
    session: str | None = None
    snapshots: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    served: int = 0
    overtaken: int = 0

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer, after=self.prompt)
        self._stops = StopMatcher(self.params.stop)
        self._splitter = ReasoningSplitter(starts_in_reasoning(self.prompt, self.tokenizer))
        self._logprobs: list[TokenLogprob] = []
        self._text, self._reasoning = [], []
        self._fresh = Delta()
        self._clock = self._made = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def abandoned(self) -> bool:
        """Whether its reader has ended, however it did: an exception may strike before a `finally` has said so."""
        if self.reader is None:
            return False
        reader: Any = self.reader()
        return reader is None or reader.gi_frame is None

    def next_mark(self) -> int | None:
        """The next length at which a chunk has to end; None without one."""
        return next((mark for mark in self.marks if mark > self.prefilled), None)

    def start_clock(self) -> None:
        """Called when the first chunk, or the first token of a prompt that needs none, is about to run."""
        self.started, self._clock = True, time.perf_counter()
        self.stats.queue_s = self._clock - self._made

    def first_token(self) -> None:
        """Called when the prompt has given its first token: prefill ends, decoding starts."""
        now = time.perf_counter()
        self.stats.first_token_s = now - self._made
        self.stats.prefill_s, self._clock = now - self._clock, now

    def push(self, tokens: list[int], logprobs: list[TokenLogprob], device_finished: bool) -> None:
        """Take a round's tokens. What comes after a completed stop string is dropped, as if it had never been drawn."""
        for at, token in enumerate(tokens):
            self.tokens.append(token)
            if self.params.logprobs is not None:
                self._logprobs.append(logprobs[at])
            text, stopped = self._stops.push(self._decoder.push([token]))
            self._add(text, token, logprobs[at : at + 1])
            if stopped:
                self.exact = device_finished and at == len(tokens) - 1
                self._finish("stop")
                return
        if self.guide is not None:
            self.guide.accept(tokens, self._splitter.in_reasoning)
        if device_finished:
            self.exact = True
            self._finish("stop" if self.tokens[-1] in self.end_ids else "length")

    def cancel(self, reason: str = "cancelled") -> None:
        """End now, with what there is."""
        if not self.finished:
            self._finish(reason)

    def fail(self, error: str) -> None:
        """End now, with what there is, because the grammar cannot go on."""
        if not self.finished:
            self.error = error
            self._finish("grammar")

    def lose(self, cause: str) -> None:
        """End without an answer: what it was computed in is gone."""
        self.lost_to, self.finish_reason = cause, "lost"

    def take(self) -> Delta:
        """The text produced since the last call; the completion comes with the last piece. AnswerLost if it will never come."""
        if self.lost_to is not None:
            raise AnswerLost(self.lost_to)
        fresh, self._fresh = self._fresh, Delta()
        if not self.finished:
            return fresh
        return replace(fresh, completion=self.completion())

    def completion(self) -> Completion:
        """The whole answer; AnswerLost as for `take`."""
        if self.lost_to is not None:
            raise AnswerLost(self.lost_to)
        return Completion(
            tokens=self.tokens,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=len(self.prompt),
            logprobs=self._logprobs if self.params.logprobs is not None else None,
            stats=self.stats,
            error=self.error,
        )

    def _finish(self, reason: str) -> None:
        self.stats.decode_s = time.perf_counter() - self._clock
        held, stopped = ("", True) if self._stops.matched else self._stops.push(self._decoder.flush())
        self._add(held if stopped else held + self._stops.flush())
        self._emit(*self._splitter.flush())
        self.finish_reason = reason  # last: whatever says that it has finished is whole

    def _add(self, text: str, token: int | None = None, logprobs: SequenceOf[TokenLogprob] = ()) -> None:
        piece = self._splitter.push(text)
        self._emit(piece.reasoning, piece.answer, [] if token is None else [token], logprobs)

    def _emit(self, reasoning: str, answer: str, tokens: SequenceOf[int] = (), logprobs: SequenceOf[TokenLogprob] = ()) -> None:
        self._text.append(answer)
        self._reasoning.append(reasoning)
        self._fresh = self._fresh + Delta(answer, reasoning, [*tokens], [*logprobs])
