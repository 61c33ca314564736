"""Tools of a request: what the template shows of them, and how the answer is read and forced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_jax.server.answer import Parser
from ninfer_jax.server.errors import bad
from ninfer_jax.text import normalize_tools
from ninfer_jax.text.tools.calls import CallParser
from ninfer_jax.text.tools.events import ContentText, Event, ReasoningText

_OPENER = "<tool_call>\n<function="


@dataclass(frozen=True)
class Tools:
    """shown: the definitions for the template, None for none. opener: text that the answer is made to begin with, after its
    reasoning, so that it calls a tool. one_call: it ends with its first call. skipped: types of tools that were left out."""

    shown: list[dict[str, Any]] | None = None
    opener: str | None = None
    one_call: bool = False
    skipped: tuple[str, ...] = ()

    def parser(self) -> Parser:
        """A new parser for one answer."""
        return AnswerParser({t["function"]["name"]: t["function"].get("parameters") or {} for t in self.shown or ()})


class AnswerParser:
    """Reasoning as it is, and the calls in the text after it."""

    def __init__(self, tools: Mapping[str, object]):
        self._calls = CallParser(tools)

    def push(self, reasoning: str, text: str) -> list[Event]:
        found: list[Event] = [ReasoningText(reasoning)] if reasoning else []
        return found + (self._calls.push(text) if text else [])

    def finish(self, truncated: bool) -> list[Event]:
        return self._calls.finish(truncated)


def openai_tools(tools: list[Any] | None, choice: str | dict[str, Any] | None, parallel: bool | None) -> Tools:
    """Tools of a chat request, `{"type": "function", "function": {...}}`. ApiError names the field."""
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            raise bad(f"tools[{index}].type: {tool['type']!r} is not supported, only function is")
    try:
        shown = normalize_tools(tools)
    except ValueError as error:
        raise bad(str(error)) from None
    name = None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if choice.get("type") != "function" or not isinstance(name, str):
            raise bad("tool_choice: must be auto, none, required or {'type': 'function', 'function': {'name': …}}", "tool_choice")
    return chosen(
        shown, name or (choice if isinstance(choice, str) else "auto"), named=name is not None, one_call=parallel is False
    )


def chosen(shown: list[dict[str, Any]] | None, choice: str, named: bool, one_call: bool, skipped: tuple[str, ...] = ()) -> Tools:
    """The tools under a choice: "auto", "none", "required", or a name if `named`."""
    names = {tool["function"]["name"] for tool in shown or ()}
    if len(names) < len(shown or ()):
        raise bad("tools: two have the same name", "tools")
    if named:
        if choice not in names:
            raise bad(f"tool_choice: there is no tool {choice!r} among the tools", "tool_choice")
        return Tools(shown, f"{_OPENER}{choice}>\n", True, skipped)
    if choice == "none":
        return Tools(None, skipped=skipped)
    if choice == "required":
        if not names:
            raise bad("tool_choice: required, but there are no tools", "tool_choice")
        only = f"{next(iter(names))}>\n" if len(names) == 1 else ""
        return Tools(shown, _OPENER + only, one_call, skipped)
    return Tools(shown, None, one_call, skipped)


def content_of(events: list[Event]) -> str:
    """The content text among the events."""
    return "".join(event.text for event in events if isinstance(event, ContentText))
