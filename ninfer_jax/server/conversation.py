"""Messages as clients send them, in the order that chat templates need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ninfer_jax.server.errors import bad

# Claude Code's first system block; it changes with every request and tells the model nothing.
_NONCE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def tool_results_in_order(messages: list[Any]) -> list[Any]:
    """The messages with the results of each turn's calls in the order of the calls: the rendered prompt has no ids, so the model
    tells results apart by their order alone. A result of an unknown call keeps its place behind them. ApiError, naming the message,
    for a second result of one call."""
    ordered: list[Any] = []
    at = 0
    while at < len(messages):
        end = at
        while end < len(messages) and _role(messages[end]) == "tool":
            end += 1
        if end == at:
            ordered.append(messages[at])
            at += 1
            continue
        calls = _call_ids(ordered[-1]) if ordered else []
        seen: set[str] = set()
        for index in range(at, end):
            name = messages[index].get("tool_call_id")
            if isinstance(name, str) and name in calls:
                if name in seen:
                    raise bad(f"messages[{index}].tool_call_id: a second result of the call {name!r}")
                seen.add(name)
        ordered += sorted(messages[at:end], key=lambda m: _place(m.get("tool_call_id"), calls))
        at = end
    return ordered


def without_nonce(system: str) -> str:
    """A system text without the line that changes with every request."""
    return _NONCE.sub("", system)


def _place(name: Any, calls: list[str]) -> int:
    """A result's place among the calls, behind them where it belongs to none."""
    return calls.index(name) if isinstance(name, str) and name in calls else len(calls)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _call_ids(message: Any) -> list[str]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    ids = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return [name for name in ids if isinstance(name, str)]
