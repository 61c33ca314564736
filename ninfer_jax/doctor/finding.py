"""One thing that was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FINE, NOTE, WRONG = "fine", "note", "wrong"
Fact = str | int | float | bool | None | list[str] | list[int]


@dataclass(frozen=True)
class Finding:
    """status: FINE, NOTE (works, but worth knowing) or WRONG (something does not work, or not safely). text: what is there.
    advice: what to do about it; "" for nothing. facts: the same for programs and for bug reports: never a path."""

    name: str
    status: str
    text: str
    advice: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


def gib(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:,.1f} GiB"
