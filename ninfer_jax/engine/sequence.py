"""One request on its way through the engine: its prompt, what was generated, and how that becomes text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine.results import Completion, Delta, Stats, TokenLogprob
from ninfer_jax.text import IncrementalDecoder, ReasoningSplitter, StopMatcher, Tokenizer, starts_in_reasoning


@dataclass(eq=False)
class Sequence:
    """Host side of a sequence. `budget`: tokens it may emit; `seed`: of its draws; `end_ids`: tokens that end it."""

    prompt: list[int]
    params: SamplingParams
    budget: int
    seed: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer
    stats: Stats = field(default_factory=Stats)
    slot: int | None = None
    table: np.ndarray | None = None
    prefilled: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer)
        self._stops = StopMatcher(self.params.stop)
        self._splitter = ReasoningSplitter(starts_in_reasoning(self.prompt, self.tokenizer))
        self._logprobs: list[TokenLogprob] = []
        self._text, self._reasoning = [], []
        self._fresh = Delta()
        self._clock = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

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
            self._finish("length")

    def take(self) -> Delta:
        """What was produced since the last call; the completion comes with the last piece."""
        fresh, self._fresh = self._fresh, Delta()
        if not self.finished:
            return fresh
        return Delta(fresh.text, fresh.reasoning, fresh.tokens, self.completion())

    def completion(self) -> Completion:
        return Completion(
            tokens=self.tokens,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            finish_reason=self.finish_reason or "length",
            prompt_tokens=len(self.prompt),
            logprobs=self._logprobs if self.params.logprobs is not None else None,
            stats=self.stats,
        )

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.stats.decode_s = time.perf_counter() - self._clock
        held, stopped = ("", True) if self._stops.matched else self._stops.push(self._decoder.flush())
        self._add(held if stopped else held + self._stops.flush(), None)
        self._emit(*self._splitter.flush(), [])

    def _add(self, text: str, token: int | None) -> None:
        piece = self._splitter.push(text)
        self._emit(piece.reasoning, piece.answer, [] if token is None else [token])

    def _emit(self, reasoning: str, answer: str, tokens: list[int]) -> None:
        self._text.append(answer)
        self._reasoning.append(reasoning)
        fresh = self._fresh
        self._fresh = Delta(fresh.text + answer, fresh.reasoning + reasoning, fresh.tokens + tokens)
