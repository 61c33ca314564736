"""The prefix cache at work: between the calls of the scheduler, the slots on the device, and bytes on the host.

In `exact` mode a checkpoint is taken only where a prompt's state has the same bits whatever follows, at multiples of the prefill
chunk, and only out of prefill: so a warm answer is the cold one, bit for bit. Of an answer nothing can be kept then, because rounds
round differently; it is settled when nobody is at work, by prefilling it. In `fast` mode checkpoints are taken at any length, out
of rounds too: less is prefilled again, and an answer may differ from the cold one where two tokens are nearly equally likely.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ninfer_jax.cache import END, SYSTEM, TURN, USER, Counters, Hit, Mark, PrefixCache, planned
from ninfer_jax.config import PAGE
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease, SlotPool
from ninfer_jax.engine.snapshot_bytes import from_bytes, to_bytes
from ninfer_jax.text.turns import turns_of

IN_FLIGHT = 8  # pages on their way to the host at a time
UNSETTLED = 16  # answers that wait for idle time, at most
TRIES = 3  # times that one is begun


@dataclass
class _Answer:
    """A prompt with its answer, up to the last line of the grid in it. lease, work: while it is being prefilled."""

    tokens: list[int]
    tries: int = 0
    lease: Lease | None = None
    work: Iterator[object] | None = None

    def stop(self) -> None:
        if self.lease is not None:
            self.lease.end()
        self.lease = self.work = None


class KeptPrefixes:
    """The way of what the runner tells into `cache` and out of it. Called by the one thread that owns the device, between
    transactions.

    mode: "exact" or "fast". identity: what must be equal for kept bytes to mean the same. told: a line for each file and directory
    that cannot be used.
    """

    def __init__(
        self,
        pool: SlotPool,
        cache: PrefixCache,
        mode: str,
        identity: Callable[[], Mapping[str, str | int]] = dict,
        told: SequenceOf[str] = (),
    ):
        self._pool, self.cache, self.mode, self.identity, self.told = pool, cache, mode, identity, told
        self.grid = pool.grid if mode == "exact" else PAGE
        self._wanted: weakref.WeakKeyDictionary[Sequence, dict[int, str]] = weakref.WeakKeyDictionary()
        self._unsettled: deque[_Answer] = deque(maxlen=UNSETTLED)
        self._struct = pool.programs.result("snapshot")[1]

    @property
    def counters(self) -> Counters:
        """Numbers of what the cache did."""
        return self.cache.counters

    def shared(self, sequence: Sequence) -> SequenceOf[int]:
        """No page of another slot."""
        return ()

    def give_way(self) -> None:
        """Stop settling an answer; it is begun again in the next idle time."""
        self._stop_settling()

    def admitted(self, sequence: Sequence, lease: Lease) -> None:
        """Bring `lease` to the deepest checkpoint, and say where chunks shall end."""
        prompt = sequence.prompt
        # Where prefill made a checkpoint, its state draws the next token; after a round the last token's hidden is gone.
        with self.cache.find(prompt, most=len(prompt) - (self.mode != "exact")) as hit:
            self._restore(lease, prompt, hit)
        self.cache.seen(prompt)
        marks = planned(len(prompt), marks_of(sequence), grid=self.grid, have=lease.length, branch=hit.seen)
        self._wanted[sequence] = {mark.length: mark.kind for mark in marks}
        sequence.marks = tuple(mark.length for mark in marks)

    def appended(self, sequence: Sequence, lease: Lease) -> None:
        """Take the checkpoint that is wanted at this length."""
        if kind := self._wanted.get(sequence, {}).pop(lease.length, None):
            self.keep(lease, sequence.prompt[: lease.length], kind)

    def ended(self, sequence: Sequence, lease: Lease) -> None:
        """Keep the answer: at once in fast mode, else when it has been settled."""
        tokens = [*sequence.prompt, *sequence.tokens]
        if self.mode == "exact":
            self.settle_later(tokens)
        elif sequence.exact and len(sequence.tokens) > 1:
            self.keep(lease, tokens[:-1], TURN)

    def settle_later(self, tokens: list[int]) -> None:
        """Prefill these tokens when nobody is at work, to the last line of the grid, so that they are known from then on."""
        line = len(tokens) // self.grid * self.grid
        if line > self.known(tokens[:line]):
            self._unsettled.append(_Answer(tokens[:line]))

    def settle_now(self, tokens: SequenceOf[int]) -> None:
        """Prefill these tokens to the last line of the grid, unless they are known so far. ValueError where no slot is free."""
        line = len(tokens) // self.grid * self.grid
        if line <= self.known(tokens):
            return
        answer = _Answer(list(tokens[:line]))
        self._stop_settling()
        self._pool.lease(line).end()
        self._unsettled.append(answer)
        while answer in self._unsettled:
            self._settle_some(answer)

    def known(self, tokens: SequenceOf[int]) -> int:
        """Tokens of these that a checkpoint covers."""
        checkpoint, _ = self.cache.match(tokens)
        return 0 if checkpoint is None else checkpoint.length

    def idle(self) -> bool:
        """One piece of work that could wait: a chunk of an answer that is to be settled, or a file. Whether there is more."""
        if self._unsettled:
            self._settle_some(self._unsettled[-1])
        elif not self.cache.idle():
            return False
        return True

    def close(self, save: bool) -> None:
        """End; save: what is in host memory goes to disk first."""
        self._stop_settling()
        self._unsettled.clear()
        if save:
            self.cache.close()

    def keep(self, lease: Lease, tokens: SequenceOf[int], kind: str) -> bool:
        """Keep what `lease` is after `tokens`, which are all it has; whether that was new and there was room."""
        started = time.perf_counter()
        try:
            state = partial(self._state_of, lease, len(tokens))
            return self.cache.keep(tokens, kind, state, partial(self._pages, lease))
        finally:
            self.counters.snapshot_s += time.perf_counter() - started

    def _restore(self, lease: Lease, prompt: SequenceOf[int], hit: Hit) -> None:
        if not hit.length:
            return
        started = time.perf_counter()
        image = hit.load()
        if image is not None:
            given = from_bytes(image.state, self._struct)
            with self._pool.transaction():
                for page, data in zip(lease.table, image.pages, strict=False):
                    self._pool.write_page(int(page), data)
                self._pool.restore(lease, given, prompt[: image.length])
        self.counters.restore_s += time.perf_counter() - started

    def _settle_some(self, answer: _Answer) -> None:
        tokens, done = answer.tokens, True
        try:
            if answer.lease is None or answer.work is None or answer.lease.lost:
                answer.stop()
                answer.tries += 1
                try:
                    answer.lease = self._pool.lease(len(tokens))
                except ValueError:  # somebody holds the slots or the pages without being at work
                    return
                with self.cache.find(tokens, most=len(tokens) - 1, counted=False) as hit:
                    self._restore(answer.lease, tokens, hit)
                answer.work = answer.lease.prefill(tokens[answer.lease.length :])
            next(answer.work)
            if answer.lease.length == len(tokens):
                self.keep(answer.lease, tokens, TURN)
            else:
                done = False
        finally:
            if done:
                self._unsettled.remove(answer)
                answer.stop()

    def _stop_settling(self) -> None:
        for answer in [a for a in self._unsettled if a.lease is not None]:
            answer.stop()
            if answer.tries >= TRIES:
                self._unsettled.remove(answer)

    def _state_of(self, lease: Lease, length: int) -> np.ndarray:
        given = lease.snapshot()
        if int(np.asarray(given.length)) != length:
            raise RuntimeError(f"a slot of {int(np.asarray(given.length))} tokens was to be kept as one of {length}")
        return to_bytes(given)

    def _pages(self, lease: Lease, pages: list[int]) -> Iterator[np.ndarray]:
        for at in range(0, len(pages), IN_FLIGHT):
            read: list[Any] = [self._pool.read_page(int(lease.table[page])) for page in pages[at : at + IN_FLIGHT]]
            for data in read:
                data.copy_to_host_async()
            while read:
                yield np.array(read.pop(0))


def marks_of(sequence: Sequence) -> list[Mark]:
    """Lengths at which conversations come back: the end of system text and tools, the starts of user turns, the end of the prompt
    before the answer's own turn is opened; and those that the client has named."""
    turns = turns_of(sequence.prompt, sequence.tokenizer)
    marks = [Mark(length, SYSTEM) for length in sequence.snapshots]
    if len(turns) > 1 and turns[0].role == "system":
        marks.append(Mark(turns[1].start, SYSTEM))
    marks += [Mark(turn.start, USER) for turn in turns[1:] if turn.role == "user"]
    if turns and turns[-1].role == "assistant":
        marks.append(Mark(turns[-1].start, END))
    return marks
