"""The questions to a cache of prefixes: when a sequence gets its slot, after each chunk of its prompt, and at its end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from ninfer_jax.cache import Counters
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease


class Prefixes(Protocol):
    """All calls come from the thread that owns the device, between two transactions. What they raise costs the entry, no answer,
    unless it came out of a transaction."""

    @property
    def counters(self) -> Counters | None:
        """Numbers of what the cache did; None without one."""
        ...

    def give_way(self) -> None:
        """Somebody waits for a slot: give back those that idle time was used with."""
        ...

    def shared(self, sequence: Sequence) -> SequenceOf[int]:
        """Pages that shall be the first ones of `sequence`. Asked before each try to admit it, of which all but the last fail."""
        ...

    def admitted(self, sequence: Sequence, lease: Lease) -> None:
        """`sequence` has its slot, and nothing is appended: bring `lease` to a length that is known, and set `sequence.marks`."""
        ...

    def appended(self, sequence: Sequence, lease: Lease) -> None:
        """A chunk has ended: `lease.length` tokens of the prompt are in the slot, all of them before the first token is drawn."""
        ...

    def ended(self, sequence: Sequence, lease: Lease) -> None:
        """The answer has come to its end, and the slot is still its own; where `sequence.exact`, it stands after all tokens but
        the last."""
        ...

    def idle(self) -> bool:
        """One piece of work that could wait; whether there is more."""
        ...

    def close(self, save: bool) -> None:
        """The engine ends; save: what is worth keeping is written first."""
        ...


class NoPrefixes:
    """No cache."""

    counters: Counters | None = None

    def give_way(self) -> None:
        pass

    def shared(self, sequence: Sequence) -> SequenceOf[int]:
        return ()

    def admitted(self, sequence: Sequence, lease: Lease) -> None:
        pass

    def appended(self, sequence: Sequence, lease: Lease) -> None:
        pass

    def ended(self, sequence: Sequence, lease: Lease) -> None:
        pass

    def idle(self) -> bool:
        return False

    def close(self, save: bool) -> None:
        pass
