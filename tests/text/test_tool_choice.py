"""`tool_choice` and `parallel_tool_calls` of each API."""

import re

import pytest

from ninfer_jax.text.tools import AnswerParser, CallBegin, tool_plan

A = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
B = {"type": "function", "function": {"name": "b"}}
NAMED = "<tool_call>\n<function=a>\n"
ANY = "<tool_call>\n<function="


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "prefix", "most"),
    [
        (None, None, "ab", "", None),
        ("auto", True, "ab", "", None),
        ("auto", False, "ab", "", 1),
        ("required", None, "ab", ANY, None),
        ({"type": "any", "disable_parallel_tool_use": True}, None, "ab", ANY, 1),
        ({"type": "auto", "disable_parallel_tool_use": False}, None, "ab", "", None),
        ({"type": "function", "function": {"name": "a"}}, None, "a", NAMED, None),
        ({"type": "function", "name": "a"}, False, "a", NAMED, 1),
        ({"type": "tool", "name": "a"}, None, "a", NAMED, None),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}, None, "b", "", None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [A, B]}}, None, "ab", ANY, None),
    ],
)
def test_every_spelling(choice: object, parallel: object, names: str, prefix: str, most: int | None):
    plan = tool_plan([A, B], choice, parallel)
    assert (set(plan.callable), plan.prefix, plan.max_calls) == (set(names), prefix, most)
    assert plan.rendered == [A, B] and plan.required is bool(prefix)


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_none_tells_the_model_of_no_tools(choice: object):
    plan = tool_plan([A], choice)
    assert (plan.rendered, plan.callable, plan.prefix, plan.required) == (None, {}, "", False)


def test_a_tool_that_may_not_be_called_is_not():
    plan = tool_plan([A, B], {"type": "tool", "name": "a"})
    parser = AnswerParser(False, plan.callable)
    events = (
        parser.push(plan.prefix)
        + parser.push("</function></tool_call><tool_call><function=b></function></tool_call>")
        + parser.finish()
    )
    assert [event.name for event in events if isinstance(event, CallBegin)] == ["a"]


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "error"),
    [
        ([A], "maybe", None, "tool_choice: must be"),
        ([A], 5, None, "tool_choice: must be"),
        ([A], {"type": "sometimes"}, None, "tool_choice.type: 'sometimes' is unknown"),
        ([A], {"type": "function"}, None, "tool_choice: must name a tool"),
        ([A], {"type": "tool", "name": "z"}, None, "tool_choice: there is no tool 'z'"),
        ([A], {"type": "allowed_tools", "mode": "never"}, None, "tool_choice.mode"),
        ([A], {"type": "allowed_tools", "tools": []}, None, "tool_choice.tools: must be a list"),
        ([A], {"type": "allowed_tools", "tools": [1]}, None, "tool_choice.tools[0]: must name a tool"),
        ([], "required", None, "tool_choice: a call is required, but the request has no tools"),
        ([A, A], None, None, "tools: two of them"),
        ([A], None, "yes", "parallel_tool_calls: must be true or false"),
        ([A], {"type": "auto", "disable_parallel_tool_use": 1}, None, "tool_choice.disable_parallel_tool_use: must be"),
    ],
)
def test_refusals_name_the_field(tools: list, choice: object, parallel: object, error: str):
    with pytest.raises(ValueError, match=re.escape(error)):
        tool_plan(tools, choice, parallel)
