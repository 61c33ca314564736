"""An engine that says what its script tells it to, for tests of the server: the text side is the real engine's, no model runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine.load import Load
from ninfer_jax.engine.requests import Requests
from ninfer_jax.engine.results import Completion, QueueFull, TokenLogprob
from ninfer_jax.model_path import tiny_path
from ninfer_jax.text import open_text

CONTEXT, ROWS = 4096, 2048


@dataclass
class Piece:
    tokens: list[int]
    logprobs: list[TokenLogprob]
    completion: Completion | None


class Running:
    def __init__(self, engine: Scripted, sequence: Any, tokens: list[int]):
        self._engine, self._sequence, self._tokens = engine, sequence, tokens
        engine.active.add(self)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        engine, sequence = self._engine, self._sequence
        if engine.prefill_s:
            await asyncio.sleep(engine.prefill_s)
        while engine.silent:
            await asyncio.sleep(0.001)
        left = self._tokens
        while not sequence.finished:
            if self not in engine.active:
                sequence.cancel()
                break
            if engine.fault is not None:
                raise engine.fault
            take, left = left[: engine.round], left[engine.round :]
            room = sequence.budget - len(sequence.tokens)
            take = take[:room]
            ends = next((at for at, token in enumerate(take) if token in sequence.end_ids), None)
            take = take if ends is None else take[: ends + 1]
            # Without an end token the script's end is what the length limit is elsewhere.
            done = ends is not None or len(take) == room or (sequence.params.ignore_eos and not left)
            assert take or done, "the script ends without an end token"
            entries = [TokenLogprob(t, -0.25, ((t, -0.25), (0, -2.0))[: sequence.params.logprobs or 0]) for t in take]
            before = len(sequence.tokens)
            sequence.push(take, entries, done)
            delta = sequence.take()
            kept = entries[: len(sequence.tokens) - before] if sequence.params.logprobs is not None else []
            if delta.completion:
                delta.completion.stats.cached_tokens = engine.cached
            yield Piece(delta.tokens, kept, delta.completion)
            await asyncio.sleep(engine.round_s)
        self.cancel()

    def cancel(self) -> None:
        self._engine.active.discard(self)


@dataclass
class Scripted:
    """script: the prompt's text -> the answer's text, control tokens included.

    round: tokens a round; round_s, prefill_s: seconds it takes; capacity: requests at a time, beyond which it is busy.
    silent: nothing comes as long as it is set.
    """

    script: Callable[[str], str]
    round: int = 4
    round_s: float = 0.0
    prefill_s: float = 0.0
    capacity: int = 64
    cached: int = 0
    context: int = CONTEXT
    fault: Exception | None = None
    silent: bool = False
    active: set[Running] = field(default_factory=set)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        path = tiny_path()
        self.text = open_text(path, ROWS)

    def default_params(self, **changes: Any) -> SamplingParams:
        return self._requests.default_params(**changes)

    def submit(
        self, prompt: list[int], params: SamplingParams, *, session: str | None = None, snapshots: Sequence[int] = ()
    ) -> Running:
        if len(self.active) >= self.capacity:
            raise QueueFull(len(self.active))
        sequence = self._requests.sequence(prompt, params, {})
        text = self.text.tokenizer.decode(prompt, skip_special=False)
        self.submitted.append({"prompt": text, "ids": prompt, "params": params, "session": session, "snapshots": tuple(snapshots)})
        said = self.script(text)
        return Running(self, sequence, self.text.tokenizer.encode(said, allow_special=True))

    def load(self) -> Load:
        busy = [{"state": "decode", "tokens": 7} for _ in list(self.active)[:4]]
        return Load((busy + [{"state": "free", "tokens": 0}] * 4)[:4], max(0, len(self.active) - 4), 3, 64, {"device": self.cached})

    def describe(self) -> dict[str, Any]:
        return {"device": "script", "dtype": "none"}

    def close(self, save: bool = True) -> bool:
        self.closed = True
        self.active.clear()
        return True

    @property
    def _requests(self) -> Requests:
        return Requests(self.text, self.context, self.context, ROWS)
