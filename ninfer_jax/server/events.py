"""Server-sent events as bytes. Each is made once a token, so nothing in it that stays the same is encoded twice."""

from __future__ import annotations

import json
from typing import Any

# Kept: `json.dumps` makes a new one for each call that is not all defaults. What it writes has no line break: an event is one line.
encoded = json.JSONEncoder(ensure_ascii=False).encode
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def as_event(said: dict[str, Any], name: str = "") -> bytes:
    """The event that says `said`, under a name if it has one."""
    return (f"event: {name}\ndata: {encoded(said)}\n\n" if name else f"data: {encoded(said)}\n\n").encode()


class Chunks:
    """Events that differ in their `choices` alone, as OpenAI's completions are streamed. head: what comes before those; tail:
    behind."""

    def __init__(self, head: dict[str, Any], tail: dict[str, Any]):
        self._head, self._tail = head, tail
        self._before = f'data: {encoded(head)[:-1]}, "choices": '
        self._after = (f", {encoded(tail)[1:]}" if tail else "}") + "\n\n"

    def __call__(self, choices: list[dict[str, Any]], **other: Any) -> bytes:
        """The event of these choices; other: in place of the tail's."""
        if other:
            return as_event(self._head | {"choices": choices} | self._tail | other)
        return (self._before + encoded(choices) + self._after).encode()
