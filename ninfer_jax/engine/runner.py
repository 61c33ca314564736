"""Decides what runs next: which sequence gets a slot, whose prompt is prefilled, and decode rounds for all that have begun."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flax import nnx

from ninfer_jax.config import PAGE
from ninfer_jax.engine.results import TokenLogprob
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease, SlotPool
from ninfer_jax.programs import Programs, RoundOutput
from ninfer_jax.state import State

PrefillProgress = Callable[[Sequence, int], None]


class Runner:
    """The queue in front of a `SlotPool`. Sequences wait in order; one is admitted when a slot and pages for all it may need
    are free.

    An exception may come out of any call, at any line. It goes to the caller as it is. If it came while the engine was at work,
    whoever holds a slot ends as "lost", and the next call begins with a fresh state; one out of `progress` costs nobody anything.
    Not thread-safe: one thread calls.
    """

    look_ahead = True

    def __init__(self, programs: Programs, parameters: nnx.State, state: State | None = None):
        self.pool = SlotPool(programs, parameters, state)
        self._live: list[Sequence] = []  # handed in and not finished, in order; those without a lease wait
        self._ahead: tuple[RoundOutput, list[Sequence]] | None = None  # a round that has been started but not read

    @property
    def state(self) -> State:
        """The device state as it stands, a round that was started ahead included; the next call reuses its buffers. Rows may
        be missing from its recurrent states, see `settle`."""
        return self.pool.state

    @property
    def busy(self) -> int:
        """Slots that a sequence or a lease holds."""
        return self.pool.busy

    @property
    def pool_tokens(self) -> int:
        """Tokens that the page pool holds in all."""
        return self.pool.total_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that the pages hold which nobody has reserved."""
        return self.pool.free_tokens

    def settle(self) -> None:
        """Let the rows that wait for the next round enter the recurrent states now, to be looked at in `state`."""
        with self.pool.transaction():
            self.pool.settle()

    def lease(self, tokens: int) -> Lease:
        """An empty slot with pages for `tokens`, for the caller's own use. ValueError if none is free."""
        self._tidy()
        return self.pool.lease(tokens)

    def score(self, tokens: list[int]) -> np.ndarray:
        """Logits of every position, float32 `[tokens, vocab rows]`; uses a free slot for the duration."""
        self._tidy()
        rows = []
        with self.pool.transaction():
            lease = self.pool.admit(len(tokens))
            while lease is not None and lease.length < len(tokens):
                count, hidden = self.pool.prefill(lease, tokens[lease.length :])
                rows.append(self.pool.logits(hidden)[:count])
            if lease is not None:
                lease.end()
        if lease is None:
            raise ValueError("score: no slot or not enough pages are free, finish or cancel a running completion first")
        return np.concatenate(rows)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError for one that will never fit."""
        need = len(sequence.prompt) + sequence.budget
        most = min(self.pool_tokens, PAGE * self.pool.programs.shape.pages_per_slot)
        if need > most:
            raise ValueError(f"prompt and answer may take {need} tokens together, the page pool holds {most}")
        self._live.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is; its slot and pages are free afterwards. It only marks it, because it comes from
        an exception's `finally`, or from a finalizer in the middle of anything; the device follows with the next call."""
        _end(sequence)

    def advance(self, progress: PrefillProgress | None = None) -> None:
        """Admit and prefill what fits, then book one decode round of every sequence that has its first token. progress:
        called after each chunk with the sequence and how many of its tokens are prefilled. ValueError if sequences wait and
        nothing will ever make room for them."""
        worked = self.prefill(progress)
        if not self.round() and not worked and self._live:
            raise ValueError("no slot or not enough pages are free: end the leases that hold them first")

    def prefill(self, progress: PrefillProgress | None = None) -> bool:
        """Admit what fits and prefill it to the first token; whether there was anything to do."""
        worked = False
        while True:
            self._tidy()
            with self.pool.transaction():
                sequence = self._prefilling() or self._admit()
                if sequence is None:
                    return worked
                worked, appended = True, self._prefill_step(sequence)
            # Outside of the transaction: what the caller does here, or fails to do, changes nothing.
            if appended and progress:
                progress(sequence, sequence.prefilled)

    def round(self) -> bool:
        """Book one decode round of every sequence that has its first token; whether there was any.

        With `look_ahead` the next round is started before this one's tokens are read, so that the device does not wait for
        the host. It goes to waste when all sequences turn out to have ended; who ends by budget is known beforehand.
        """
        self._tidy()
        with self.pool.transaction():
            started = self._ahead if self._ahead and not all(s.finished for s in self._ahead[1]) else self._start_round()
            self._ahead = None
            if started is None:
                return False
            out, sequences = started
            draft = self.pool.programs.shape.draft
            if self.look_ahead and any(len(s.tokens) + draft + 1 < s.budget for s in sequences if not s.finished):
                self._ahead = self._start_round()
            # A sequence may have been cancelled while its round ran.
            self._book(_read(out, sequences), [s for s in sequences if not s.finished], drafts=draft)
        return True

    def _tidy(self) -> None:
        """Bring the books in order, whatever has struck since the last call."""
        self.pool.tidy()
        for sequence in self._live:
            lease = sequence.lease
            if not sequence.finished and lease is not None and lease.lost:
                sequence.lose(lease.lost)
            elif sequence.abandoned or (lease is not None and lease.ended):
                _end(sequence)
        self._live = [s for s in self._live if not s.finished]

    def _prefilling(self) -> Sequence | None:
        return next((s for s in self._live if s.lease is not None and not s.begun and not s.finished), None)

    def _admit(self) -> Sequence | None:
        sequence = next((s for s in self._live if s.lease is None and not s.finished), None)
        if sequence is None:
            return None
        need = len(sequence.prompt) + sequence.budget
        sequence.lease = self.pool.admit(need, sequence.budget, sequence.params, sequence.seed, sequence.end_ids)
        return None if sequence.lease is None else sequence

    def _prefill_step(self, sequence: Sequence) -> bool:
        """Append the next chunk of the prompt, or draw the first token if there is none; whether there was one."""
        start, lease = sequence.prefilled, sequence.lease
        assert lease is not None  # it has been admitted
        if start < len(sequence.prompt):
            if start == 0:
                sequence.start_clock()
            count, _ = self.pool.prefill(lease, sequence.prompt[start:])
            sequence.prefilled += count
            return True
        out = _read(self.pool.begin(lease), [sequence])
        sequence.first_token()
        sequence.begun = True
        self._book(out, [sequence], drafts=None)
        return False

    def _start_round(self) -> tuple[RoundOutput, list[Sequence]] | None:
        """Start a round; its output, to be read later, and the sequences it is for."""
        decoding = [s for s in self._live if s.begun and not s.finished]
        return (self.pool.round(), decoding) if decoding else None

    def _book(self, out: RoundOutput, sequences: list[Sequence], drafts: int | None) -> None:
        for sequence in sequences:
            lease = sequence.lease
            assert lease is not None  # who has none takes no part
            slot = lease.slot
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
                lease.end()


def _end(sequence: Sequence) -> None:
    """Its slot first, because what is made of its text may fail."""
    if sequence.lease is not None:
        sequence.lease.end()
    sequence.cancel()


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
