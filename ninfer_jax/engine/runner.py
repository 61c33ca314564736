"""Drives the programs: gives sequences slots and pages, prefills them chunk by chunk, and runs decode rounds for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from ninfer_jax.config import PAGE
from ninfer_jax.engine.results import TokenLogprob
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.programs import PrefillInputs, Programs, RoundOutput, admission
from ninfer_jax.state import PageAllocator, State

PrefillProgress = Callable[[Sequence, int], None]


class Runner:
    """Owns the device state. Sequences wait in order; one is admitted when a slot and pages for all it may need are free.

    Not thread-safe: one thread calls `submit`, `advance` and `cancel`.
    """

    look_ahead = True

    def __init__(self, programs: Programs, parameters: nnx.State, state: State):
        self._programs, self._parameters, self._state = programs, jax.tree.leaves(parameters), state
        shape = programs.shape
        self._pages = PageAllocator(shape.pages, shape.pages_per_slot)
        self._slots: list[Sequence | None] = [None] * shape.slots
        self._waiting: deque[Sequence] = deque()
        self._ahead: tuple[RoundOutput, list[Sequence]] | None = None  # a round that has been started but not read

    @property
    def state(self) -> State:
        """The device state as it stands, a round that was started ahead included; the next call reuses its buffers. Rows may
        be missing from its recurrent states, see `settle`."""
        return self._state

    @property
    def busy(self) -> int:
        """Sequences that hold a slot."""
        return sum(s is not None for s in self._slots)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the page pool holds in all."""
        return self._pages.total * PAGE

    @property
    def free_tokens(self) -> int:
        """Tokens that the pages hold which no sequence has reserved."""
        return self._pages.free_tokens

    def settle(self) -> None:
        """Let the rows that wait for the next round enter the recurrent states now, to be looked at in `state`."""
        self._state = self._programs.settle(self._state)

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is; its slot and pages are free afterwards."""
        sequence.cancel()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.slot is not None:
            self._release(sequence)

    def advance(self, progress: PrefillProgress | None = None) -> None:
        """Admit and prefill what fits, then book one decode round of every sequence that has its first token.

        With `look_ahead` the next round is started before this one's tokens are read, so that the device does not wait for
        the host. It goes to waste when all sequences turn out to have ended; who ends by budget is known beforehand.
        """
        while self._waiting and (slot := self._free_slot()) is not None:
            sequence = self._waiting[0]
            if not self._pages.fits(len(sequence.prompt) + sequence.budget):
                break
            self._waiting.popleft()
            self._admit(sequence, slot)
            self._prefill(sequence, progress)
        started = self._ahead if self._ahead and not all(s.finished for s in self._ahead[1]) else self._start_round()
        self._ahead = None
        if started is None:
            return
        out, sequences = started
        most = self._programs.shape.draft + 1
        if self.look_ahead and any(len(s.tokens) + most < s.budget for s in sequences if not s.finished):
            self._ahead = self._start_round()
        # A sequence may have been cancelled while its round ran.
        self._book(_read(out, sequences), [s for s in sequences if not s.finished], drafts=self._programs.shape.draft)

    def _start_round(self) -> tuple[RoundOutput, list[Sequence]] | None:
        """Start a round; its output, to be read later, and the sequences it is for."""
        decoding = [s for s in self._slots if s is not None and not s.finished]
        if not decoding:
            return None
        self._state, out = self._programs.decode_round(self._parameters, self._state)
        return out, decoding

    def score(self, sequence: Sequence) -> np.ndarray:
        """Logits of every prompt position, float32 `[tokens, vocab]`; uses a free slot for the duration."""
        slot = self._free_slot()
        if slot is None or not self._pages.fits(len(sequence.prompt) + sequence.budget):
            raise ValueError("score: no slot or not enough pages are free, finish or cancel a running completion first")
        self._admit(sequence, slot)
        try:
            rows = []
            while (hidden := self._prefill_chunk(sequence)) is not None:
                count = min(self._programs.chunk, len(sequence.prompt) - len(rows) * self._programs.chunk)
                rows.append(np.asarray(self._programs.head(self._parameters, hidden))[:count])
            return np.concatenate(rows)
        finally:
            self._release(sequence)

    def _free_slot(self) -> int | None:
        return next((i for i, s in enumerate(self._slots) if s is None), None)

    def _admit(self, sequence: Sequence, slot: int) -> None:
        sequence.table = self._pages.reserve(len(sequence.prompt) + sequence.budget)
        sequence.slot, self._slots[slot] = slot, sequence
        new = admission(slot, sequence.table, sequence.budget, sequence.params, sequence.seed, sequence.end_ids)
        self._state = self._programs.admit(self._state, new)

    def _release(self, sequence: Sequence) -> None:
        self._state = self._programs.release(self._state, np.int32(sequence.slot))
        self._pages.release(sequence.table)
        self._slots[sequence.slot] = None
        sequence.slot = sequence.table = None

    def _prefill(self, sequence: Sequence, progress: PrefillProgress | None) -> None:
        sequence.start_clock()
        while self._prefill_chunk(sequence) is not None:
            if progress:
                progress(sequence, sequence.prefilled)
        self._state, out = self._programs.begin(self._parameters, self._state, np.int32(sequence.slot))
        out = _read(out, [sequence])
        sequence.first_token()
        self._book(out, [sequence], drafts=None)

    def _prefill_chunk(self, sequence: Sequence) -> jax.Array | None:
        """Run the next chunk and return its hidden rows; None when the whole prompt has been consumed."""
        start, chunk = sequence.prefilled, self._programs.chunk
        part = sequence.prompt[start : start + chunk]
        if not part:
            return None
        following = sequence.prompt[start + 1 : start + 1 + len(part)]
        tokens, next_tokens = np.zeros(chunk, np.int32), np.full(chunk, -1, np.int32)
        tokens[: len(part)], next_tokens[: len(following)] = part, following
        positions = np.ascontiguousarray(np.broadcast_to(start + np.arange(chunk, dtype=np.int32), (3, chunk)))
        inputs = PrefillInputs(np.int32(sequence.slot), tokens, next_tokens, np.int32(len(part)), positions)
        self._state, hidden = self._programs.prefill(self._parameters, self._state, inputs)
        sequence.prefilled += len(part)
        return hidden

    def _book(self, out: RoundOutput, sequences: list[Sequence], drafts: int | None) -> None:
        for sequence in sequences:
            slot = sequence.slot
            count = int(out.emitted[slot])
            tokens = out.tokens[slot, :count].tolist()
            before = len(sequence.tokens)
            sequence.push(tokens, _logprobs(out, sequence, slot, tokens), bool(out.finished[slot]))
            if drafts is not None:
                sequence.stats.rounds += 1
                sequence.stats.drafted += drafts
                # Drafts come first in a round; a stop string may have dropped some.
                sequence.stats.accepted += min(int(out.accepted[slot]), len(sequence.tokens) - before)
            if sequence.finished:
                self._release(sequence)


def _read(out: RoundOutput, sequences: list[Sequence]) -> RoundOutput:
    """`out` with what these sequences need of it on the host. Each array costs tens of microseconds to read."""
    fields = out._fields if any(s.params.logprobs is not None for s in sequences) else ("tokens", "emitted", "accepted", "finished")
    return out._replace(**{name: np.asarray(getattr(out, name)) for name in fields})


def _logprobs(out: RoundOutput, sequence: Sequence, slot: int, tokens: list[int]) -> list[TokenLogprob]:
    wanted = sequence.params.logprobs
    if wanted is None:
        return []
    entries = []
    for row, token in enumerate(tokens):
        ids, values = out.top_tokens[slot, row, :wanted].tolist(), out.top_logprobs[slot, row, :wanted].tolist()
        entries.append(TokenLogprob(token, float(out.logprob[slot, row]), tuple(zip(ids, values, strict=True))))
    return entries
