"""Events: what an answer consists of, in the order in which it is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class ReasoningText:
    """Text to append to the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """Text to append to the answer's content."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. index: 0 for the answer's first call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """JSON text to append to the arguments of the call that is open."""

    index: int
    delta: str


@dataclass(frozen=True)
class CallEnd:
    """A tool call ends; its arguments are one JSON object now.

    complete: False if the answer was cut inside the call, or ended inside a value: what arguments there are were whole, others
    are missing. dropped: names of parameters whose value no type of the schema fits, and pieces between parameters that are
    none, as written.
    """

    index: int
    complete: bool
    dropped: tuple[str, ...] = ()


Event: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd
