"""The order of things: who gets a slot next, and who a chunk of prefill. Knows sequences and their lengths, no device.

For a slot: in order of arrival. Where the first that waits does not fit into the free pages, later ones that fit go ahead of it,
but no more than `OVERTAKING` of them; then all wait until it fits.

For a chunk, of the prompts that have a slot: by turns the one with the fewest tokens left, and the one that has waited longest
since its last chunk. So with S slots a prompt of c chunks is through after 2·S·c chunks at most, whatever comes, and one that is
shorter than all others after 2·c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ninfer_jax.engine.sequence import Sequence

OVERTAKING = 8


class Scheduler:
    """The sequences that are handed in and not finished, in order of arrival; those without a lease wait."""

    def __init__(self) -> None:
        self._live: list[Sequence] = []
        self._chunks = 0  # given out so far

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> list[Sequence]:
        """Those without a slot, in order."""
        return [s for s in self._live if s.lease is None and not s.finished]

    @property
    def prefilling(self) -> list[Sequence]:
        """Those with a slot and without a first token."""
        return [s for s in self._live if s.lease is not None and not s.begun and not s.finished]

    @property
    def decoding(self) -> list[Sequence]:
        """Those that take part in rounds."""
        return [s for s in self._live if s.begun and not s.finished]

    def add(self, sequence: Sequence) -> None:
        if all(s.finished for s in self._live):
            self._chunks = 0  # what comes now goes as it would on a new engine
        self._live.append(sequence)

    def drop_finished(self) -> None:
        self._live = [s for s in self._live if not s.finished]

    def for_a_slot(self, admit: Callable[[Sequence], bool]) -> Sequence | None:
        """The next that `admit` takes; None if none is to have a slot now. admit: False where it does not fit."""
        waiting = self.waiting
        for sequence in waiting:
            if admit(sequence):
                for passed in waiting[: waiting.index(sequence)]:
                    passed.overtaken += 1
                sequence.served = self._chunks
                return sequence
            if sequence.overtaken >= OVERTAKING:
                return None
        return None

    def for_a_chunk(self) -> Sequence | None:
        """The sequence whose prompt goes on; None if none is under way. Counts as given out."""
        prefilling = self.prefilling
        if not prefilling:
            return None
        self._chunks += 1
        oldest = self._chunks % 2 == 0
        chosen = min(prefilling, key=lambda s: s.served if oldest else len(s.prompt) - s.prefilled)
        chosen.served = self._chunks
        return chosen
