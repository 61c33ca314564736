"""One request on its way through the engine: its prompt, what was generated, and how that becomes text."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine.results import AnswerLost, Completion, Delta, Stats, TokenLogprob
from ninfer_jax.engine.slot_pool import Lease
from ninfer_jax.text import IncrementalDecoder, ReasoningSplitter, StopMatcher, Tokenizer, starts_in_reasoning


@dataclass(eq=False)
class Sequence:
    """Host side of a sequence. `budget`: tokens it may emit; `seed`: of its draws; `end_ids`: tokens that end it.

    lease: its slot, None while it waits. begun: has its first token. reader: the generator that hands its pieces on, None
    if nobody does; once that has ended nobody waits for the sequence any more.
    """

    prompt: list[int]
    params: SamplingParams
    budget: int
    seed: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer
    stats: Stats = field(default_factory=Stats)
    lease: Lease | None = None
    prefilled: int = 0
    begun: bool = False
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    lost_to: str | None = None
    reader: weakref.ref[Generator[Any, None, None]] | None = None

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer, after=self.prompt)
        self._stops = StopMatcher(self.params.stop)
        self._splitter = ReasoningSplitter(starts_in_reasoning(self.prompt, self.tokenizer))
        self._logprobs: list[TokenLogprob] = []
        self._text, self._reasoning = [], []
        self._fresh = Delta()
        self._clock = time.perf_counter()

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

    def start_clock(self) -> None:
        """Called when the first chunk is about to run."""
        self._clock = time.perf_counter()

    def first_token(self) -> None:
        """Called when the prompt has given its first token: prefill ends, decoding starts."""
        now = time.perf_counter()
        self.stats.prefill_s, self._clock = now - self._clock, now

    def push(self, tokens: list[int], logprobs: list[TokenLogprob], device_finished: bool) -> None:
        """Take a round's tokens. What comes after a completed stop string is dropped, as if it had never been drawn."""
        for at, token in enumerate(tokens):
            self.tokens.append(token)
            if self.params.logprobs is not None:
                self._logprobs.append(logprobs[at])
            text, stopped = self._stops.push(self._decoder.push([token]))
            self._add(text, token)
            if stopped:
                self._finish("stop")
                return
        if device_finished:
            self._finish("stop" if self.tokens[-1] in self.end_ids else "length")

    def cancel(self) -> None:
        """End now, with what there is."""
        if not self.finished:
            self._finish("cancelled")

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
        return Delta(fresh.text, fresh.reasoning, fresh.tokens, self.completion())

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
        )

    def _finish(self, reason: str) -> None:
        self.stats.decode_s = time.perf_counter() - self._clock
        held, stopped = ("", True) if self._stops.matched else self._stops.push(self._decoder.flush())
        self._add(held if stopped else held + self._stops.flush(), None)
        self._emit(*self._splitter.flush(), [])
        self.finish_reason = reason  # last: whatever says that it has finished is whole

    def _add(self, text: str, token: int | None) -> None:
        piece = self._splitter.push(text)
        self._emit(piece.reasoning, piece.answer, [] if token is None else [token])

    def _emit(self, reasoning: str, answer: str, tokens: list[int]) -> None:
        self._text.append(answer)
        self._reasoning.append(reasoning)
        fresh = self._fresh
        self._fresh = Delta(fresh.text + answer, fresh.reasoning + reasoning, fresh.tokens + tokens)
