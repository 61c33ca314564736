"""`tool_choice` and `parallel_tool_calls`, in each API's spelling, as what they do to a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ninfer_jax.files import shown
from ninfer_jax.text.messages import normalize_tools
from ninfer_jax.text.tools.calls import FUNCTION, OPEN

_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


@dataclass(frozen=True)
class ToolPlan:
    """The effect of a request's tools and choices.

    rendered: the tools that the template gets, or None. All that were sent, whatever the choice, so that the prompt's beginning
        stays the same; with "none" none, since a model that is told of tools calls them.
    callable: name -> JSON schema of its parameters, of those that may be called; for `AnswerParser`.
    prefix: what the answer must begin with, behind its reasoning; "" for nothing. Where the prompt ends outside reasoning it can be
        appended to the prompt (and pushed into the parser first); otherwise a grammar forces it (`ninfer_jax.text.grammar`).
    required: at least one call must come.
    max_calls: how many may come; None for any number.
    """

    rendered: list[dict] | None
    callable: Mapping[str, object]
    prefix: str
    required: bool
    max_calls: int | None


def tool_plan(tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None) -> ToolPlan:
    """The plan of a request.

    tools: as for `normalize_tools`. tool_choice: None or "auto", "none", "required" or "any"; or an object with one of these as its
    `type`; or the name of one tool, as `{"type": "function", "function": {"name": …}}`, `{"type": "function", "name": …}` or
    `{"type": "tool", "name": …}`; or several, as `{"type": "allowed_tools", "mode": …, "tools": […]}`. An object may have
    `disable_parallel_tool_use`. ValueError names the field.
    """
    normal = normalize_tools(tools)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in normal or []}
    if len(schemas) < len(normal or []):
        raise ValueError("tools: two of them have the same name")
    mode, names = _choice(tool_choice)
    for name in names if names is not None else ():
        if name not in schemas:
            raise ValueError(f"tool_choice: there is no tool {shown(name)} among the request's tools")
    if mode == "required" and not schemas:
        raise ValueError("tool_choice: a call is required, but the request has no tools")
    if mode == "none" or not schemas:
        return ToolPlan(None, {}, "", False, None)
    callable_ = schemas if names is None else {name: schemas[name] for name in names}
    only = f"{next(iter(callable_))}>\n" if len(callable_) == 1 else ""
    prefix = f"{OPEN}\n{FUNCTION}{only}" if mode == "required" else ""
    return ToolPlan(normal, callable_, prefix, mode == "required", 1 if _single(tool_choice, parallel_tool_calls) else None)


def _choice(choice: object) -> tuple[str, Sequence[str] | None]:
    """(auto, none or required; the only tools that may be called, or None for all)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str) and choice in _MODES:
        return _MODES[choice], None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(kind, str):
        raise ValueError(f'tool_choice: must be "auto", "none", "required" or an object with a type, not {shown(choice)}')
    if kind in _MODES:
        return _MODES[kind], None
    if kind == "allowed_tools":
        inner = choice["allowed_tools"] if isinstance(choice.get("allowed_tools"), Mapping) else choice
        mode, named = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required"):
            raise ValueError(f'tool_choice.mode: must be "auto" or "required", not {shown(mode)}')
        if not isinstance(named, list) or not named:
            raise ValueError("tool_choice.tools: must be a list of tools")
        return mode, [_named(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(named)]
    if kind in ("function", "tool"):
        return "required", [_named(choice, "tool_choice")]
    allowed = ", ".join([*_MODES, "function", "tool", "allowed_tools"])
    raise ValueError(f"tool_choice.type: {shown(kind)} is unknown, allowed are {allowed}")


def _named(tool: object, where: str) -> str:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: must name a tool, as {{'type': 'function', 'function': {{'name': …}}}}")
    return name


def _single(choice: object, parallel: object) -> bool:
    """Whether only one call may come."""
    if parallel is not None and not isinstance(parallel, bool):
        raise ValueError(f"parallel_tool_calls: must be true or false, not {shown(parallel)}")
    disabled = choice.get("disable_parallel_tool_use") if isinstance(choice, Mapping) else None
    if disabled is not None and not isinstance(disabled, bool):
        raise ValueError(f"tool_choice.disable_parallel_tool_use: must be true or false, not {shown(disabled)}")
    return parallel is False or disabled is True
