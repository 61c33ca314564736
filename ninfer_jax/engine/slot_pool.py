"""The one holder of the device state, of the parameters, and of the pages and slots that are given out.

Programs overwrite the state that they are given. An exception out of one, or a signal between two lines, may therefore
leave a state that is gone, or one that the host's books no longer describe. Nothing is repaired then: the state, its pages and its
slots are one object, `_Life`, and the next use begins another. What lived in the old one is told so by `Lease.lost`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from ninfer_jax.config import PAGE
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine.chunks import next_chunk
from ninfer_jax.engine.results import AnswerLost, first_line
from ninfer_jax.programs import PrefillInputs, Programs, RoundOutput, Snapshot, admission
from ninfer_jax.state import PageAllocator, State, StateShape

Result = TypeVar("Result")


@dataclass
class _Place:
    """A slot given out: its block-table row, and the lease, which nobody may hold any more."""

    table: np.ndarray
    lease: weakref.ref[Lease]

    @property
    def held(self) -> bool:
        lease = self.lease()
        return lease is not None and not lease.ended


class _Life:
    """One allocation of the state, and all that is true of it alone. Replaced whole, never mended."""

    def __init__(self, shape: StateShape, state: State | None):
        self.pages = PageAllocator(shape.pages, shape.pages_per_slot)
        self.places: list[_Place | None] = [None] * shape.slots
        self.state = state  # None until it is needed
        self.changing = False  # between the two ends of a transaction
        self.cause = "an exception"


class Lease:
    """A slot with its pages, for one sequence. `with` gives it back at the end; so does dropping it.

    tokens: that it has room for. length: appended so far. table int32 `[pages_per_slot]`: its pages, then zeros. Each method is a
    transaction of its own; ValueError where there is no room, AnswerLost once the state is gone.
    """

    def __init__(self, pool: SlotPool, life: _Life, slot: int, tokens: int, table: np.ndarray):
        self._pool, self._life = pool, life
        self.slot, self.tokens, self.table = slot, tokens, table
        self.length, self.ended = 0, False

    @property
    def lost(self) -> str | None:
        """The error that ended the state this slot was part of; None as long as all is well."""
        return None if self._pool._life is self._life else self._life.cause

    def end(self) -> None:
        """Give slot and pages back. Runs nothing, so it cannot fail: the device follows before the next program."""
        self.ended = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def prefill(self, tokens: SequenceOf[int]) -> Iterator[tuple[int, jax.Array]]:
        """Append `tokens` chunk by chunk as this is read: (tokens in the chunk, its hidden rows `[rows, hidden]`)."""
        tokens, at = list(tokens), 0
        while at < len(tokens):
            self._check(len(tokens) - at)
            with self._pool.transaction():
                count, hidden = self._pool.prefill(self, tokens[at:])
            at += count
            yield count, hidden

    def begin(self) -> RoundOutput:
        """Draw the first token after what is appended; the slot takes part in rounds from now on."""
        self._check(0)
        with self._pool.transaction():
            return self._pool.begin(self)

    def step(self, token: int) -> np.ndarray:
        """Append `token` as a decode round does; its logits, float32 `[vocab rows]`."""
        self._check(1)
        with self._pool.transaction():
            return np.asarray(self._pool.step(self, token))

    def snapshot(self) -> Snapshot:
        """The slot's state after all its tokens, on the device; its pages apart."""
        self._check(0)
        with self._pool.transaction():
            return self._pool.snapshot(self)

    def restore(self, given: Snapshot, tokens: SequenceOf[int]) -> None:
        """Let the slot, whose pages hold the keys and values of `tokens`, stand where `given` was taken: after them.
        given: on the device or on the host."""
        self._check(len(tokens) - self.length)
        with self._pool.transaction():
            self._pool.restore(self, given, tokens)

    def logits(self, hidden: jax.Array) -> np.ndarray:
        """Logits of hidden rows that `prefill` gave, float32 `[rows, vocab rows]`."""
        with self._pool.transaction():
            return self._pool.logits(hidden)

    def _check(self, more: int) -> None:
        self._pool.tidy()
        if self.lost:
            raise AnswerLost(self.lost)
        if self.ended:
            raise ValueError("this slot has been given back, lease another")
        if self.length + more > self.tokens:
            raise ValueError(f"{more} tokens after {self.length} are more than the {self.tokens} that were asked for")


class SlotPool:
    """Slots, pages, device state and parameters of one engine.

    What changes them happens inside `with pool.transaction()`, opened by whoever makes several changes that belong together:
    `lease` opens one of its own, every other method that runs a program takes no care. Not thread-safe.
    parameters: of the model, as `jax.tree.leaves` or a tree of them. state: None allocates one when it is first needed.
    """

    def __init__(self, programs: Programs, parameters: nnx.State | list[jax.Array], state: State | None = None):
        self.programs, self.parameters = programs, jax.tree.leaves(parameters)
        self._life = _Life(programs.shape, state)

    @property
    def state(self) -> State:
        """The device state as it stands; the next program reuses its buffers."""
        self.tidy()
        return self._state()

    @property
    def life(self) -> object:
        """The owner of pages and snapshots: when this is another object, a state was lost, and they with it."""
        self.tidy()
        return self._life

    @property
    def pages(self) -> PageAllocator:
        """The owners of pages, in this life."""
        return self._life.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all pools together: the size of what `read_page` gives."""
        return self.programs.page_bytes

    @property
    def grid(self) -> int:
        """Tokens between two lengths at which a prompt's state has the same bits whatever follows."""
        return self.programs.chunk

    @property
    def busy(self) -> int:
        """Slots given out."""
        return len(self._held())

    @property
    def total_tokens(self) -> int:
        """Tokens that all pages hold."""
        return self._life.pages.total * PAGE

    @property
    def free_tokens(self) -> int:
        """Tokens that the pages hold which nobody has reserved."""
        if self._life.changing:  # what was reserved is lost
            return self.total_tokens
        owners = self._life.pages.owners()
        for place in self._life.places:
            if place is not None and not place.held:
                owners[place.table] -= 1
        return self.total_tokens - PAGE * int(np.count_nonzero(owners[1:] > 0))

    def tidy(self) -> None:
        """Give up a state that an exception has cut a transaction of. Runs no program. Not for finalizers, which may run in the
        middle of a transaction."""
        life = self._life
        if life.changing:
            # By name, because the exception's traceback may hold references, and two states do not fit on a card.
            for leaf in jax.tree.leaves(life.state):
                leaf.delete()
            self._life = _Life(self.programs.shape, None)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Changes that belong together: done when this ends, or else the state is given up with all that lives in it.

        Not nested.
        """
        self.tidy()
        life = self._life
        life.changing = True
        try:
            self._take_back(life)
            yield
        except BaseException as error:
            life.cause = first_line(error)
            raise
        life.changing = False

    def lease(self, tokens: int, shared: SequenceOf[int] = ()) -> Lease:
        """A slot with pages for `tokens`, empty; its first pages are `shared`, with others. ValueError if none is free."""
        context = self.programs.shape.context
        if tokens > context:
            raise ValueError(f"context holds {context} tokens, {tokens} are asked for; load a larger context")
        with self.transaction():
            lease = self.admit(tokens, shared=shared)
        if lease is None:
            raise ValueError("no slot or not enough pages are free, finish or cancel a running completion first")
        return lease

    def admit(
        self,
        tokens: int,
        budget: int = 0,
        params: SamplingParams | None = None,
        seed: int = 0,
        end_ids: tuple[int, ...] = (),
        shared: SequenceOf[int] = (),
    ) -> Lease | None:
        """A slot with pages for `tokens`, for a sequence that may emit `budget` of them; None if none is free. Its first pages
        are `shared`, which have an owner already and which nobody writes to: tokens are appended after them."""
        life = self._life
        slot = next((slot for slot, place in enumerate(life.places) if place is None), None)
        if slot is None or not life.pages.fits(tokens, len(shared)):
            return None
        table = life.pages.reserve(tokens, shared)
        lease = Lease(self, life, slot, tokens, table)
        life.places[slot] = _Place(table, weakref.ref(lease))
        new = admission(slot, table, budget, params or SamplingParams(), seed, end_ids)
        life.state = self.programs.admit(self._state(), new)
        return lease

    def prefill(self, lease: Lease, tokens: SequenceOf[int], until: int | None = None) -> tuple[int, jax.Array]:
        """Append the first chunk of `tokens`: how many tokens it has, and its hidden rows `[rows, hidden]`. until: a length, a
        multiple of 64, that it does not go beyond; which program runs, and with it every bit, depends on all of `tokens`."""
        start = lease.length
        rows, count = next_chunk(start, start + len(tokens), self.programs.chunk, self.programs.short)
        count = count if until is None else min(count, until - start)
        inputs = np.zeros(rows, np.int32)
        inputs[:count] = tokens[:count]
        positions = np.ascontiguousarray(np.broadcast_to(start - 1 + np.arange(rows + 1, dtype=np.int32), (3, rows + 1)))
        host: tuple[Any, ...] = (_number(lease.slot), inputs, _number(count), positions)
        given = PrefillInputs(*host)
        hidden = self.run(lambda parameters, state: self.programs.prefill(parameters, state, given))
        lease.length += count
        return count, hidden

    def drafts(self) -> np.ndarray:
        """Drafts that the next round verifies, int32 `[slots, K]`; waits for the last one."""
        return np.array(self._state().slots.drafts)

    def constrain(self, lease: Lease, words: np.ndarray, drafts: np.ndarray) -> None:
        """Masks uint32 `[R, words]` for the slot's next draw alone, and the drafts int32 `[K]` to verify in it."""
        given: Any = (words, drafts)
        self.run(lambda _, state: (self.programs.constrain(state, _number(lease.slot), *given), None))

    def begin(self, lease: Lease) -> RoundOutput:
        """Draw the first token of a prompt that is appended; its slot takes part in rounds from now on."""
        return self.run(lambda parameters, state: self.programs.begin(parameters, state, _number(lease.slot)))

    def round(self) -> RoundOutput:
        """One decode round of all slots that have begun."""
        return self.run(self.programs.decode_round)

    def step(self, lease: Lease, token: int) -> jax.Array:
        """Append `token` as a decode round does; its logits, float32 `[vocab rows]`."""
        logits = self.run(lambda parameters, state: self.programs.step(parameters, state, _number(lease.slot), _number(token)))
        lease.length += 1
        return logits

    def snapshot(self, lease: Lease) -> Snapshot:
        """The slot's state as it stands, what waits settled first. One at a time is planned for: drop it before the next."""
        return self.run(lambda _, state: self.programs.snapshot(state, _number(lease.slot)))

    def restore(self, lease: Lease, given: Snapshot, tokens: SequenceOf[int]) -> None:
        """Let the slot stand where `given` was taken, after `tokens`, whose keys and values its pages hold."""
        ids = np.zeros(self.programs.shape.context, np.int32)
        ids[: len(tokens)] = tokens
        told: Any = ids
        self.run(lambda _, state: (self.programs.restore(state, _number(lease.slot), given, told), None))
        lease.length = len(tokens)

    def read_page(self, page: int) -> jax.Array:
        """Contents of a page in all pools, uint8 `[page_bytes]`, on the device."""
        return self.programs.read_page(self._state(), _number(page))

    def write_page(self, page: int, data: Any) -> None:
        """Put what `read_page` gave into a page; data: on the device or on the host."""
        self.run(lambda _, state: (self.programs.write_page(state, _number(page), data), None))

    def copy_page(self, source: int, target: int) -> None:
        """Put into page `target` what page `source` holds."""
        self.run(lambda _, state: (self.programs.copy_page(state, _number(source), _number(target)), None))

    def settle(self) -> None:
        """Let the rows that wait for the next round enter the recurrent states now, to be looked at in `state`."""
        self.run(lambda parameters, state: (self.programs.settle(state), None))

    def logits(self, hidden: jax.Array) -> np.ndarray:
        """Final-normed hidden rows `[rows, hidden]` -> float32 `[rows, vocab rows]`, on the host."""
        return np.asarray(self.programs.head(self.parameters, hidden))

    def run(self, program: Callable[[list[jax.Array], State], tuple[State, Result]]) -> Result:
        """Replace the state by what `program(parameters, state) -> (state, result)` makes of it, which may overwrite it."""
        # The new state is never a local variable: a traceback would keep it.
        self._life.state, result = program(self.parameters, self._state())
        return result

    def _held(self) -> list[_Place]:
        # Of a state that an exception has cut a transaction of nothing is held any more.
        return [] if self._life.changing else [place for place in self._life.places if place is not None and place.held]

    def _state(self) -> State:
        if self._life.state is None:
            self._life.state = self.programs.allocate()
        return self._life.state

    def _take_back(self, life: _Life) -> None:
        for slot, place in enumerate(life.places):
            if place is not None and not place.held:
                life.state = self.programs.release(self._state(), _number(slot))
                life.pages.release(place.table)
                life.places[slot] = None


def _number(value: int) -> Any:
    """int32 for a program; compiled programs take NumPy's numbers and arrays for JAX's."""
    return np.int32(value)
