"""Lengths at which checkpoints are taken, which of them a conversation keeps, and the order in which they go.

A checkpoint costs as many bytes as the pages of thousands of tokens, so a conversation has a dozen at most. They lie where agents
come back to: the end of the system text and tools (every conversation starts there), the starts of the last two user turns (edits,
retries), the end of a prompt and of a turn (the next one), a branch point that was met before, and every 8,192 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

SYSTEM, BRANCH, USER, END, TURN, STEP = KINDS = ("system", "branch", "user", "end", "turn", "step")  # strongest first
EVERY = 8192
RECENT = 4 * EVERY  # steps this far behind the end are all kept; further back those at EVERY times a power of two
USERS = 2
ENDS = 2
MOST = 12  # checkpoints of one conversation
LIVE = 8  # conversations whose newest checkpoint goes last


class Mark(NamedTuple):
    """A length in tokens and the kind of a checkpoint there."""

    length: int
    kind: str


class Candidate(Protocol):
    """A checkpoint, as far as the order of eviction asks. used: a clock, larger is later."""

    used: int


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def planned(tokens: int, marks: Iterable[Mark] = (), *, grid: int, have: int = 0, branch: int = 0) -> list[Mark]:
    """Checkpoints to take while a prompt of `tokens` is prefilled from `have` on, shortest first, at multiples of `grid`.

    marks: SYSTEM, USER and END of the prompt, END its end where none is given. branch: tokens that match pages seen before, or 0.
    """
    marks = list(marks)
    users = [m for m in marks if m.kind == USER][-USERS:]
    ends = [m for m in marks if m.kind == END] or [Mark(tokens, END)]
    steps = [Mark(length, STEP) for length in range(EVERY, tokens + 1, EVERY) if _keeps_step(length, tokens)]
    wanted = [*(m for m in marks if m.kind == SYSTEM), Mark(branch, BRANCH), *users, *ends, *steps]
    kinds: dict[int, str] = {}
    for mark in sorted(wanted, key=lambda m: KINDS.index(m.kind)):
        kinds.setdefault(min(mark.length, tokens) // grid * grid, mark.kind)
    return [Mark(length, kinds[length]) for length in sorted(kinds) if length > have]


def superfluous(way: Sequence[Mark]) -> list[Mark]:
    """Those that a conversation keeps no longer, given all on its way, shortest first. Never the last."""
    if not way:
        return []
    *before, last = way
    kept = [m for m in before if m.kind != STEP or _keeps_step(m.length, last.length)]
    for kind, most in ((USER, USERS), (END, ENDS), (TURN, ENDS)):
        of_kind = [m for m in [*kept, last] if m.kind == kind]
        kept = [m for m in kept if m.kind != kind or m in of_kind[-most:]]
    # What is still too many goes by strength, the weakest first, and among equals the earliest.
    order = sorted(kept, key=lambda m: (-KINDS.index(m.kind), m.length))
    gone = set(order[: max(0, len(kept) + 1 - MOST)])
    return [m for m in before if m not in kept or m in gone]


def eviction_order(checkpoints: Iterable[AnyCandidate], frontiers: Iterable[AnyCandidate], live: int = LIVE) -> list[AnyCandidate]:
    """`checkpoints`, first to go first: the longest unused, but those of `frontiers` that were used last, `live` of them, after all
    others. The newest checkpoint of a conversation that goes on is worth more to it than any other to anybody."""
    spared = set(map(id, sorted(frontiers, key=lambda c: c.used)[-live:])) if live else set()
    return sorted(checkpoints, key=lambda c: (id(c) in spared, c.used))


def _keeps_step(length: int, tokens: int) -> bool:
    steps = length // EVERY
    return tokens - length <= RECENT or steps & (steps - 1) == 0
