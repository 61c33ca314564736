"""Carries out what the scheduler chooses: slots for sequences, chunks of their prompts, decode rounds of all that have begun."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from ninfer_jax.config import PAGE
from ninfer_jax.engine.guides import Planned, plan
from ninfer_jax.engine.prefixes import NoPrefixes, Prefixes
from ninfer_jax.engine.results import TokenLogprob, first_line
from ninfer_jax.engine.scheduler import Scheduler
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease, SlotPool
from ninfer_jax.programs import Programs, RoundOutput
from ninfer_jax.state import State

PrefillProgress = Callable[[Sequence, int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class _Flight:
    """A program that draws tokens, dispatched and not read. most: tokens that each sequence gets of it at most. drafts: of a
    round; None for the first token of a prompt."""

    out: RoundOutput
    sequences: list[Sequence]
    most: int
    drafts: int | None


@dataclass
class Counts:
    """Work done since the start. chunks, prefilled: calls of prefill, and the tokens they appended. rounds: read; tokens:
    generated; drafted, accepted: tokens proposed, and those that became output. cached: prompt tokens that needed no prefill."""

    chunks: int = 0
    prefilled: int = 0
    cached: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Runner:
    """Sequences on their way through a `SlotPool`, in the order of a `Scheduler`.

    An exception may come out of any call, at any line. It goes to the caller as it is. If it came while the engine was at work,
    whoever holds a slot ends as "lost", and the next call begins with a fresh state; one out of `progress` or of the cache of
    prefixes costs nobody anything. Not thread-safe: one thread calls; owner: which one, by `threading.get_ident()`, where that is
    to be checked.
    """

    look_ahead = True

    def __init__(self, programs: Programs, parameters: nnx.State, state: State | None = None, prefixes: Prefixes | None = None):
        self.pool = SlotPool(programs, parameters, state)
        self.prefixes: Prefixes = prefixes or NoPrefixes()
        self.counts = Counts()
        self.owner: int | None = None
        self.faults: deque[str] = deque(maxlen=16)  # of prefixes' cache and figures: they cost no answer; newest last
        self._scheduler = Scheduler()
        self._flights: list[_Flight] = []  # in the order of the device
        self._ended: list[Sequence] = []  # answers whose slots are still their own
        self._scored: Lease | None = None
        self._chunk: jax.Array | None = None  # of the last chunk, unless a round was read since

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
    def live(self) -> list[Sequence]:
        """Sequences that are handed in and not finished, in order of arrival."""
        return [s for s in self._scheduler if not s.finished]

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
            lease = self._scored = self.pool.admit(len(tokens))
        if lease is None:
            raise ValueError("score: no slot or not enough pages are free, finish or cancel a running completion first")
        try:
            while lease.length < len(tokens):
                with self.pool.transaction():
                    count, hidden = self.pool.prefill(lease, tokens[lease.length :])
                # Outside: it reads nothing of the state, so that to fail here costs no answer.
                rows.append(self.pool.logits(hidden)[:count])
            return np.concatenate(rows)
        finally:
            lease.end()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError for one that will never fit."""
        self._check_owner()
        need = len(sequence.prompt) + sequence.budget
        most = min(self.pool_tokens, PAGE * self.pool.programs.shape.pages_per_slot)
        if need > most:
            raise ValueError(f"prompt and answer may take {need} tokens together, the page pool holds {most}")
        self._scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is; its slot and pages are free afterwards. It only marks it, because it comes from
        an exception's `finally`, or from a finalizer in the middle of anything; the device follows with the next call."""
        _end(sequence)

    def advance(self, progress: PrefillProgress | None = None) -> None:
        """One `turn`, and `finish`. ValueError if sequences wait and nothing will ever make room for them."""
        worked = self.turn(progress)
        self.finish()
        if not worked and len(self._scheduler):
            raise ValueError("no slot or not enough pages are free: end the leases that hold them first")

    def turn(self, progress: PrefillProgress | None = None) -> bool:
        """Give slots to those that fit, append one chunk of one prompt, and book a decode round of all that have begun: between two
        rounds there is never more than one chunk. Whether there was anything to do. progress: called after the chunk with the
        sequence and how many of its tokens are prefilled."""
        worked = self._admit()
        sequence = self._next_chunk(progress)
        if sequence is not None:
            self._begin(sequence)
        rounds = self._round()
        return rounds or worked or sequence is not None

    def finish(self) -> None:
        """Give back the slots of answers that have ended, and tell the cache of prefixes before; whoever waits for them has them
        by then."""
        while self._ended:
            sequence = self._ended.pop()
            lease = sequence.lease
            assert lease is not None  # it took part in a round
            if sequence.lost_to is None and not lease.lost and not lease.ended:
                self._ask(lambda s=sequence, at=lease: self.prefixes.ended(s, at))
            lease.end()
        self._flights = [f for f in self._flights if not all(s.finished for s in f.sequences)]

    def prefill(self, progress: PrefillProgress | None = None) -> bool:
        """Admit what fits and prefill it to the first token, without rounds; whether there was anything to do."""
        worked = False
        while True:
            worked |= self._admit()
            sequence = self._next_chunk(progress, wait=False)
            if sequence is None:
                return worked
            worked = True
            if self._begin(sequence):
                self._book_flights(keep=0)
                self.finish()

    def round(self) -> bool:
        """A turn without prefill: whether there was anything to read."""
        worked = self._round()
        self.finish()
        return worked

    def _round(self) -> bool:
        """Book what has been drawn: a decode round of all that have begun, or the first token of one; whether there was any.

        With `look_ahead` the next round is started before this one's tokens are read, so that the device does not wait for
        the host. It goes to waste when all sequences turn out to have ended; who ends by budget is known beforehand. Not with a
        grammar among them: its masks are made of the tokens before.
        """
        self._tidy()
        guided = any(s.guide is not None for s in self._scheduler.decoding)
        if guided and self._flights:
            self._book_flights(keep=0)
        masks = plan(self._scheduler.decoding, self.pool.drafts()) if guided else []
        with self.pool.transaction():
            flights = self._flights
            flights += self._start_round(masks)
            if self.look_ahead and len(flights) == 1 and not guided:
                flights += self._start_round()
        if not flights:
            return guided
        self._book_flights(keep=int(self.look_ahead and len(flights) > 1 and flights[-1].drafts is not None))
        return True

    def idle(self) -> bool:
        """One piece of the cache's work that could wait, unless somebody is at work; whether there is more."""
        self._tidy()
        return not len(self._scheduler) and bool(self._ask(self.prefixes.idle))

    def _tidy(self) -> None:
        """Bring the books in order, whatever has struck since the last call."""
        self._check_owner()
        self.pool.tidy()
        now = time.monotonic()
        if self._scored is not None:
            self._scored.end()
            self._scored = None
        self.finish()
        for sequence in self._scheduler:
            lease = sequence.lease
            if sequence.finished:
                _end(sequence)
            elif lease is not None and lease.lost:
                sequence.lose(lease.lost)
            elif sequence.abandoned or (lease is not None and lease.ended):
                _end(sequence)
            elif sequence.deadline is not None and now >= sequence.deadline:
                _end(sequence, "deadline")
        self._scheduler.drop_finished()
        self._flights = [f for f in self._flights if not all(s.finished for s in f.sequences)]
        if not self._scheduler.prefilling:
            self._chunk = None

    def _check_owner(self) -> None:
        if self.owner is not None and self.owner != threading.get_ident():
            raise RuntimeError("this engine belongs to an AsyncEngine: hand requests to that one")

    def _admit(self) -> bool:
        """Slots for those that are to have one; whether there were any."""
        self._tidy()
        admitted = False
        if self._scheduler.waiting:
            self._ask(self.prefixes.give_way)
        while self.pool.busy < self.pool.programs.shape.slots:
            sequence = self._scheduler.for_a_slot(self._admitted)
            if sequence is None:
                break
            admitted, lease = True, sequence.lease
            assert lease is not None  # it has just been made
            self._ask(lambda s=sequence, at=lease: self.prefixes.admitted(s, at))
            sequence.prefilled = sequence.stats.cached_tokens = lease.length
            self.counts.cached += lease.length
        return admitted

    def _admitted(self, sequence: Sequence) -> bool:
        need = len(sequence.prompt) + sequence.budget
        shared = self._ask(lambda: self.prefixes.shared(sequence)) or ()
        with self.pool.transaction():
            try:
                lease = self.pool.admit(need, sequence.budget, sequence.params, sequence.seed, sequence.end_ids, shared)
            except Exception as error:  # it would be the first to be tried again
                sequence.lose(first_line(error))
                raise
            sequence.lease = lease
        return sequence.lease is not None

    def _next_chunk(self, progress: PrefillProgress | None, wait: bool = True) -> Sequence | None:
        """Append the next chunk; whose it was, None if no prompt is under way. A prompt that is known to its end needs none.
        wait: until the chunk before the last one is done, so that whoever comes next is not behind a whole prompt."""
        self._tidy()
        sequence = self._scheduler.for_a_chunk()
        if sequence is None:
            return None
        lease = sequence.lease
        assert lease is not None  # otherwise it waits
        if not sequence.started:
            sequence.start_clock()
        sequence.prefilled = lease.length
        if sequence.prefilled < len(sequence.prompt):
            with self.pool.transaction():
                before, self._chunk = self._chunk, None
                count, hidden = self.pool.prefill(lease, sequence.prompt[lease.length :], sequence.next_mark())
                sequence.prefilled = lease.length
                self.counts.chunks += 1
                self.counts.prefilled += count
                if wait:
                    self._chunk = hidden
                    jax.block_until_ready(before)
            self._ask(lambda: self.prefixes.appended(sequence, lease))
            if progress:
                progress(sequence, sequence.prefilled)
        return sequence

    def _begin(self, sequence: Sequence) -> bool:
        """Draw the first token of a prompt that is appended to its end; it takes part in rounds from now on. Whether it is."""
        self._tidy()
        lease = sequence.lease
        # What the caller did after its chunk may have ended it, or let it begin.
        if lease is None or lease.length < len(sequence.prompt) or sequence.begun or sequence.finished:
            return False
        shape = self.pool.programs.shape
        masks = plan([sequence], np.zeros((shape.slots, shape.draft), np.int32))
        if sequence.finished:
            return False
        with self.pool.transaction():
            self._constrain(masks)
            self._flights.append(_Flight(self.pool.begin(lease), [sequence], 1, None))
            sequence.begun = True
        return True

    def _constrain(self, masks: list[Planned]) -> None:
        for planned in masks:
            self.pool.constrain(*planned)

    def _start_round(self, masks: list[Planned] | None = None) -> list[_Flight]:
        """A round of all that have begun, started; none if they all may end with what is in flight. masks: for its draws."""
        draft, decoding = self.pool.programs.shape.draft, self._scheduler.decoding
        for sequence in decoding:
            if len(sequence.tokens) + sum(f.most for f in self._flights if sequence in f.sequences) < sequence.budget:
                self._constrain(masks or [])
                return [_Flight(self.pool.round(), decoding, draft + 1, draft)]
        return []

    def _book_flights(self, keep: int) -> None:
        """Book all that is in flight but the last `keep`."""
        with self.pool.transaction():
            self._chunk = None
            while len(self._flights) > keep:
                flight = self._flights.pop(0)
                out = _read(flight.out, flight.sequences)
                self.counts.rounds += flight.drafts is not None
                for sequence in flight.sequences:
                    # It may have been cancelled since.
                    if not sequence.finished:
                        self._book(sequence, out, flight.drafts)
                        if sequence.finished:
                            self._ended.append(sequence)

    def _book(self, sequence: Sequence, out: RoundOutput, drafts: int | None) -> None:
        """Hand the sequence its tokens. If its text fails, it is lost and nobody else."""
        lease, counts = sequence.lease, self.counts
        assert lease is not None  # who has none takes no part
        slot = lease.slot
        count = int(out.emitted[slot])
        tokens = out.tokens[slot, :count].tolist()
        before = len(sequence.tokens)
        if drafts is None:
            sequence.first_token()
        try:
            sequence.push(tokens, _logprobs(out, sequence, slot, tokens), bool(out.finished[slot]))
        except Exception as error:
            sequence.lose(first_line(error))
        counts.tokens += len(sequence.tokens) - before
        if drafts is not None:
            # Drafts come first in a round; a stop string may have dropped some.
            accepted = min(int(out.accepted[slot]), len(sequence.tokens) - before)
            sequence.stats.rounds += 1
            sequence.stats.drafted += int(out.drafted[slot])
            sequence.stats.accepted += accepted
            counts.drafted += int(out.drafted[slot])
            counts.accepted += accepted

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The answer of the cache of prefixes. None, and a fault noted, where it fails and the state is whole; what has cut a
        transaction goes on."""
        life = self.pool.life
        try:
            return question()
        except Exception as error:
            if self.pool.life is not life:
                raise
            self.faults.append(first_line(error))
            return None


def _end(sequence: Sequence, reason: str = "cancelled") -> None:
    """Its slot first, because what is made of its text may fail."""
    if sequence.lease is not None:
        sequence.lease.end()
    sequence.cancel(reason)


def _read(out: RoundOutput, sequences: list[Sequence]) -> RoundOutput:
    """`out` with what these sequences need of it on the host. Each array costs tens of microseconds to read."""
    read = ("tokens", "emitted", "drafted", "accepted", "finished")
    fields = out._fields if any(s.params.logprobs is not None for s in sequences) else read
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
