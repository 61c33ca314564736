"""The grammar that an answer must follow: a request's format, or the schemas of its strict tools, as one grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ninfer_jax.decoding import Grammar
from ninfer_jax.server.errors import bad
from ninfer_jax.text import grammar as grammars
from ninfer_jax.text.tools import ToolPlan


def constrained(
    plan: ToolPlan, tools: list[Any] | None, format: Mapping[str, Any] | None = None, field: str = "response_format"
) -> tuple[ToolPlan, Grammar | None]:
    """(the plan, the grammar of the answer or None). tools: as they were sent, in any API's spelling. format: as OpenAI's chat API
    has it, or flat, with `schema` beside `type`, as the others do. A grammar forces a call that is required, and the plan has no
    prefix then. ApiError for a format or a schema that cannot be followed, and for a format beside tools that may be called."""
    try:
        if format is not None and (found := grammars.response_format(_nested(format), field)) is not None:
            if plan.callable:
                raise bad(f'{field}: not together with tools that may be called (tool_choice: "none" keeps them from it)', field)
            return plan, found
        if plan.callable and any(_is_strict(tool) for tool in tools or ()):
            return replace(plan, prefix=""), grammars.calls(plan)
    except grammars.GrammarError as error:
        raise bad(str(error).replace(".json_schema.schema", ".schema") if _is_flat(format) else str(error), field) from None
    return plan, None


def _is_flat(format: Mapping[str, Any] | None) -> bool:
    return format is not None and format.get("type") == "json_schema" and "schema" in format and "json_schema" not in format


def _nested(format: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": format["schema"]}} if _is_flat(format) else format


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    inner = function if isinstance(function, Mapping) else tool
    return isinstance(inner, Mapping) and inner.get("strict") is True
