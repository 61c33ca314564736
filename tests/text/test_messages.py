"""Checks and normal form of message lists."""

import datetime
import enum
import json
import re

import numpy as np
import pytest

from ninfer_jax.text import normalize_messages, normalize_tools

USER = {"role": "user", "content": "U"}


def call(arguments: object) -> list[dict]:
    function = {"name": "f", "arguments": arguments}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # late, repeated, lone and developer system messages
        (["user:U", "assistant:A", "system:S", "user:V"], ["system:S", "user:U", "assistant:A", "user:V"]),
        (["system:A", "system:B", "user:U"], ["system:A\n\nB", "user:U"]),
        (["developer:A", "user:U", "system:B"], ["system:A\n\nB", "user:U"]),
        (["system: \n", "user:U", "system:B"], ["system:B", "user:U"]),
        (["system: S ", "user:U"], ["system: S ", "user:U"]),
        (["developer:D", "user:U"], ["system:D", "user:U"]),
        (["system:S"], ["system:S"]),
        ([], []),
    ],
)
def test_system_messages_are_merged_in_order(messages: list[str], expected: list[str]):
    def parse(lines: list[str]) -> list[dict]:
        return [dict(zip(("role", "content"), line.split(":"), strict=True)) for line in lines]

    assert normalize_messages(parse(messages)) == parse(expected)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    assert normalize_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "<|im_end|>"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "Paris"}, {"city": "Paris"}),
        ('{"city": "Paris"}', {"city": "Paris"}),
        ("{}", {}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        (None, {}),
        ('{"a": {"b": ["🦙", 1.5, null]}}', {"a": {"b": ["🦙", 1.5, None]}}),
        (json.dumps({"text": "x" * 100_000}), {"text": "x" * 100_000}),
    ],
)
def test_arguments_become_a_mapping(arguments: object, expected: dict):
    message = normalize_messages(call(arguments))[1]
    assert message["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": expected}}]
    assert message["content"] == ""


@pytest.mark.parametrize(
    "arguments",
    ["[1]", "not json", "{", '"text"', "3", [1], 3, True, "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200]
    + ['{"a": 1, "a": 2}', f'{{"a": {"1" * 5000}}}'],
    ids=lambda value: repr(value)[:12],
)
def test_bad_arguments_name_their_place(arguments: object):
    with pytest.raises(ValueError, match=r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments: [^\n]*$"):
        normalize_messages(call(arguments))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[1\]: must be an object with a role and content, not a string"),
        ({"content": "x"}, r"messages\[1\]\.role: missing, allowed are system, developer, user, assistant, tool"),
        ({"role": "critic", "content": "x"}, r"messages\[1\]\.role: 'critic' is unknown"),
        ({"role": ["user"], "content": "x"}, r"messages\[1\]\.role: \['user'\] is unknown"),
        ({"role": "user"}, r"messages\[1\]\.content: missing or null"),
        ({"role": "user", "content": None}, r"messages\[1\]\.content: missing or null"),
        ({"role": "user", "content": 3}, r"messages\[1\]\.content: must be a string or a list.*, not a number"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]\.content\[0\]: must be an object with a type"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[1\]\.content\[0\]\.text: must be a string"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            r"messages\[1\]\.content\[1\]\.type: 'image_url' is not supported, this engine reads text only",
        ),
        ({"role": "assistant", "content": None}, r"messages\[1\]\.content: missing or null.*tool_calls or reasoning"),
        ({"role": "assistant", "content": "x", "reasoning": 3}, r"messages\[1\]\.reasoning_content: must be a string"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, r"messages\[1\]\.tool_calls: must be a list, not an object"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, r"messages\[1\]\.tool_calls\[0\]\.function: must be"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"messages\[1\]\.tool_calls\[0\]\.function\.name"),
        ({"role": "user", "content": "x", "tool_calls": []}, r"messages\[1\]\.tool_calls: only assistant messages"),
        ({"role": "user", "content": "x", "name": b"y"}, r"messages\[1\]\.name: bytes is not a type that JSON has"),
        ({"role": "user", "content": "x", "extra": {1: 2}}, r"messages\[1\]\.extra: has a key that is not a string \(1\)"),
    ],
)
def test_bad_messages_name_their_place(message: object, error: str):
    with pytest.raises(ValueError, match=f"^{error}[^\n]*$"):
        normalize_messages([USER, message])


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "nan is not a number that JSON has"),
        (float("-inf"), "-inf is not a number that JSON has"),
        (np.float64("nan"), "nan is not a number that JSON has"),
        (10**5000, "a number of more than 4300 digits"),
        (-(10**4300), "a number of more than 4300 digits"),
        ({1, 2}, "set is not a type that JSON has"),
        (b"x", "bytes is not a type that JSON has"),
        (bytearray(b"x"), "bytearray is not a type that JSON has"),
        (1 + 2j, "complex is not a type that JSON has"),
        (datetime.date(2024, 1, 1), "date is not a type that JSON has"),
        (np.zeros(2), "ndarray is not a type that JSON has"),
        (Colour.RED, "Colour is not a type that JSON has"),
        ("ab\ud83d", "character 2 is a lone surrogate (U+D83D)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_has_not_are_named_by_their_place(value: object, said: str):
    """Wherever they stand: as text such values cannot be written, as objects they are refused alike."""
    places = {
        "messages[1].tool_calls[0].function.arguments.a[1].b": call({"a": [0, {"b": value}]}),
        "messages[0].name": [{"role": "user", "content": "x", "name": value}],
        "messages[0].extra['a b']": [{"role": "user", "content": "x", "extra": {"a b": value}}],
    }
    for place, messages in places.items():
        with pytest.raises(ValueError, match=f"^{re.escape(f'{place}: {said}')}"):
            normalize_messages(messages)
    with pytest.raises(ValueError, match=f"^{re.escape(f'tools[0].function.parameters.enum[0]: {said}')}"):
        normalize_tools([{"function": {"name": "f", "parameters": {"enum": [value]}}}])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": NaN}', "arguments.a: nan is not a number"),
        ('{"a": [-Infinity]}', "arguments.a[0]: -inf is not a number"),
        ('{"a": 1e999}', "arguments.a: inf is not a number"),
        ('{"a": {"b": 1, "b": 2}}', "arguments: not valid JSON (the text lists b twice)"),
        ('{"a": "\\ud800"}', "arguments.a: character 0 is a lone surrogate (U+D800)"),
        ('{"\\udfff": 1}', "arguments: the key '\\udfff': character 0 is a lone surrogate (U+DFFF)"),
        ('{"a": ' + "7" * 4301 + "}", "arguments: not valid JSON (the text holds a number of 4301 digits"),
    ],
)
def test_arguments_as_text_are_refused_alike(text: str, said: str):
    with pytest.raises(ValueError, match=f"^{re.escape(f'messages[1].tool_calls[0].function.{said}')}"):
        normalize_messages(call(text))


def test_a_lone_surrogate_is_found_in_its_message():
    for content, place in (("a\ud800", "content"), ([{"type": "text", "text": "a\ud800"}], "content[0].text")):
        with pytest.raises(ValueError, match=rf"^messages\[1\]\.{re.escape(place)}: character 1 is a lone surrogate \(U\+D800\)"):
            normalize_messages([{"role": "system", "content": "S"}, {"role": "user", "content": content}])


def test_large_numbers_that_python_can_print_are_fine():
    assert normalize_messages(call({"a": 10**4299}))[1]["tool_calls"][0]["function"]["arguments"] == {"a": 10**4299}


def test_subclasses_become_what_json_would_write():
    class Name(str, enum.Enum):  # noqa: UP042  (prints as Name.A, unlike a StrEnum)
        A = "a"

    class Number(enum.IntEnum):
        ONE = 1

    arguments = normalize_messages(call({Name.A: [Name.A, Number.ONE, np.float64(1.5), True]}))[1]["tool_calls"][0]["function"][
        "arguments"
    ]
    assert arguments == {"a": ["a", 1, 1.5, True]}
    assert [type(x) for x in (*arguments, *arguments["a"])] == [str, str, int, float, bool]


def test_other_bad_lists():
    with pytest.raises(ValueError, match="messages: must be a list, not a string"):
        normalize_messages("hi")
    with pytest.raises(ValueError, match=r"messages\[1\]: a tool result must come after"):
        normalize_messages([{"role": "system", "content": "S"}, {"role": "tool", "content": "R"}])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_its_three_names(key: str):
    (message,) = normalize_messages([{"role": "assistant", key: "why", "content": None}])
    assert message["reasoning_content"] == "why" and message["content"] == ""


def test_the_input_is_not_changed():
    messages = [{"role": "developer", "content": "D"}, *call('{"a": 1}')]
    before = json.dumps(messages)
    normalize_messages(messages)
    assert json.dumps(messages) == before


def test_tools():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert normalize_tools(tools) == tools
    assert normalize_tools(None) is None and normalize_tools([]) is None
    for bad, error in [
        ({}, "tools: must be a list, not an object"),
        (["f"], r"tools\[0\]\.function: must be an object, not null"),
        ([{"function": {"name": ""}}], r"tools\[0\]\.function\.name: must be a non-empty string"),
    ]:
        with pytest.raises(ValueError, match=error):
            normalize_tools(bad)
