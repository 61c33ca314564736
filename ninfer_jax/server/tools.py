"""Tools of a request in each API's spelling, and the parser of its answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ninfer_jax.server.answer import Parser
from ninfer_jax.server.errors import bad
from ninfer_jax.text import StopMatcher, Tokenizer, starts_in_reasoning
from ninfer_jax.text.tools import AnswerParser, ContentText, Event, Outcome, ToolPlan, tool_plan


def plan_of(tools: list[Any] | None, choice: object = None, parallel: bool | None = None) -> ToolPlan:
    """The plan for tools as the chat API has them, `{"type": "function", "function": {...}}`. ApiError names the field."""
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            raise bad(f"tools[{index}].type: {tool['type']!r} is not supported, only function is")
    try:
        return tool_plan(tools, choice, parallel)
    except ValueError as error:
        raise bad(str(error)) from None


def parser_for(
    ids: Sequence[int], tokenizer: Tokenizer, plan: ToolPlan, stop: Sequence[str], prefix: str = "call_"
) -> Callable[[], Parser]:
    """Makes a parser for each answer to a prompt. stop: as `SamplingParams.stop`, checked. prefix: of the ids of calls."""
    thinking = starts_in_reasoning(ids, tokenizer)
    return lambda: AnswerParser(thinking, plan.callable, stop, plan.max_calls, lambda: prefix + secrets.token_hex(12))


class RawParser:
    """Text as it is, up to a stop string: for completions, which know neither reasoning nor tools."""

    in_reasoning = open_reasoning = False

    def __init__(self, stop: Sequence[str]):
        self._stops = StopMatcher(stop)
        self.done = False
        self.outcome: Outcome | None = None

    def push(self, text: str) -> list[Event]:
        """The text that is certain to come before a stop string."""
        text, self.done = self._stops.push(text)
        return [ContentText(text)] if text else []

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest."""
        text = "" if self.done else self._stops.flush()
        self.outcome = Outcome("length" if cut and not self.done else "stop", self._stops.matched)
        self.done = True
        return [ContentText(text)] if text else []


def content_of(events: list[Event]) -> str:
    """The content text among the events."""
    return "".join(event.text for event in events if isinstance(event, ContentText))
