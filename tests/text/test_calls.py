"""Tool calls in streamed text: any cut of any text, and an oracle that reads whole texts."""

import itertools
import json
import random

import call_oracle
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax.text import ChatTemplate
from ninfer_jax.text.tools import CallArguments, CallBegin, CallEnd, CallParser, ContentText, typed

TOOLS = {
    "f": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": ["boolean", "null"]}, "x": {}},
    },
    "write": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {},
}


def parse(pieces: list[str], cut: bool = False) -> list:
    """[content | (name, arguments, complete, dropped)], with everything checked that a reader relies on."""
    parser = CallParser(TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(cut)
    found, name, arguments, ids = [], None, "", []
    for event in events:
        match event:
            case ContentText(text):
                assert text and name is None
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallBegin(index, identity, name):
                assert arguments == "" and index == len(ids)
                ids.append(identity)
            case CallArguments(index, delta):
                assert name is not None and delta and index == len(ids) - 1
                arguments += delta
            case CallEnd(index, complete, dropped):
                assert name is not None and index == len(ids) - 1
                found.append((name, json.loads(arguments), complete, dropped))
                name, arguments = None, ""
    assert name is None and len(set(ids)) == len(ids) == parser.begun
    return found


def call(name: str, *values: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def oracle(text: str, cut: bool) -> list:
    def fits(function: str, key: str, value: str) -> object:
        try:
            return typed(value, TOOLS[function].get("properties", {}).get(key, {}))
        except ValueError:
            raise KeyError(key) from None

    return call_oracle.read(text, {name: set(schema.get("properties", {})) for name, schema in TOOLS.items()}, fits, cut)


# Pieces of the format, whole and broken, and what may stand in values.
PIECES = [
    "<tool_call>", "</tool_call>", "</function>", "</parameter>", "<function=f>", "<function=write>", "<function=now>",
    "<function=no>", "<function=", "<parameter=n>", "<parameter=s>", "<parameter=b>", "<parameter=x>", "<parameter=text>",
    "<parameter=other>", "<parameter=", "<parameter=s=", ">", "<", "</", "\n", "\n\n", " ", "5", "True", "null", "text", '"q"',
    '{"a": [1]}', "<tool_call>\n<function=f>\n", "\n</parameter>\n", "\n</function>\n</tool_call>", call("f", ("n", "1")),
    call("write", ("path", "a"), ("text", "b")), "<tool", "</param", "\r\n",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=10).map(
        lambda pieces: "<tool_call>\n<function=f>\n<parameter=s>\n" + "".join(pieces)
    ),
    st.text(alphabet="<>/=\nfunctiolparametsx ", max_size=60),
)


@settings(max_examples=1500, deadline=None)
@given(TEXTS, st.booleans(), st.randoms(use_true_random=False))
def test_any_cut_of_any_text_reads_as_the_oracle_reads_the_whole(text: str, cut: bool, rng: random.Random):
    expected = oracle(text, cut)
    assert parse([text], cut) == expected
    assert parse(list(text), cut) == expected
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    assert parse([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])], cut) == expected


VALUES = {"integer": st.integers(), "number": st.floats(allow_nan=False, allow_infinity=False), "boolean": st.booleans()}
JSON = st.recursive(
    st.one_of(st.none(), st.text(max_size=8), *VALUES.values()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
# Text that no tag of the format follows right behind a closing tag: what a value may hold.
LITERAL = st.lists(
    st.sampled_from([*(p for p in PIECES if "<parameter=" not in p and "call>" not in p), "</parameter>)"]), max_size=6
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.text(max_size=40), LITERAL, st.integers(1, 9))
def test_what_the_template_writes_is_read_back(template: ChatTemplate, value: object, text: str, literal: list[str], size: int):
    # White space at a value's borders is the value's own, but for carriage returns, which may belong to the line feed.
    text = (text + ".".join([*literal, ""])).replace("\r", "")
    arguments = {"x": value if not isinstance(value, str) else [value], "s": text, "note": text[:2] + "#"}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Yes.", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}] * 2},
    ]
    rendered = template.render(history, None, False)
    answer = rendered.split("</think>\n\n", 1)[1].removesuffix("<|im_end|>\n")
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    assert parse(pieces) == ["Yes.", *[("f", arguments, True, ())] * 2]


TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
SCHEMAS = st.recursive(
    st.one_of(
        st.just({}),
        st.sampled_from(TYPES).map(lambda kind: {"type": kind}),
        st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda kinds: {"type": kinds}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        inner.map(lambda item: {"type": "array", "items": item}),
        inner.map(lambda item: {"type": "object", "properties": {"a": item}, "additionalProperties": item}),
        inner.map(
            lambda item: {"$defs": {"T": item}, "type": ["object", "null"], "properties": {"a": {"$ref": "#/properties/p/$defs/T"}}}
        ),
    ),
    max_leaves=5,
)
WRITTEN = st.one_of(
    JSON.map(json.dumps),
    JSON.map(repr),
    st.text(max_size=10),
    st.sampled_from(["NaN", "1e3", "5.0", "+5", "TRUE", "None", "1e999", "[1, 2", "-"]),
)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, st.lists(WRITTEN, min_size=1, max_size=2), st.booleans())
def test_arguments_parse_and_fit_the_schema_whatever_was_written(schema: dict, values: list[str], cut: bool):
    parameters = {"type": "object", "properties": {"first": {"type": "string"}, "p": schema}}
    parser = CallParser({"tool": parameters})
    text = call("tool", ("first", "1"), *(("p", value) for value in values))
    events = [event for character in text[: -20 if cut else None] for event in parser.push(character)] + parser.finish(cut)
    arguments = json.loads("".join(event.delta for event in events if isinstance(event, CallArguments)))
    jsonschema.validate(arguments, parameters)
    assert arguments["first"] == "1"


CASES = {
    "prose first": ("Let me check.\n" + call("f", ("n", "5")), ["Let me check.", ("f", {"n": 5}, True, ())]),
    "two calls": (call("f", ("n", "5")) + "\n" + call("now"), [("f", {"n": 5}, True, ()), ("now", {}, True, ())]),
    "prose behind": (call("now") + "\n\nDone.\n", [("now", {}, True, ()), "Done.\n"]),
    "no </tool_call>": (call("f", ("n", "5")).removesuffix("</tool_call>"), [("f", {"n": 5}, True, ())]),
    "no </function>": (call("f", ("n", "5")).replace("</function>\n", ""), [("f", {"n": 5}, True, ())]),
    "no </parameter>": (call("f", ("n", "5"), ("s", "a")).replace("</parameter>\n", ""), [("f", {"n": 5, "s": "a"}, True, ())]),
    "doubled tags": (
        call("f", ("s", "a"), ("n", "5")).replace("</", "</", 1).replace("</parameter>", "</parameter>\n</parameter>")
        + "\n</function></tool_call>",
        [("f", {"s": "a", "n": 5}, True, ())],
    ),
    "a tag in a value": (call("f", ("s", 'print("</parameter>")')), [("f", {"s": 'print("</parameter>")'}, True, ())]),
    "all tags in a value": (
        call("write", ("text", "So: " + call("f", ("n", "1")) + ", or so.")),
        [("write", {"text": "So: " + call("f", ("n", "1")) + ", or so."}, True, ())],
    ),
    "lines at a value's borders": (call("f", ("s", "\n\na\n")), [("f", {"s": "\n\na\n"}, True, ())]),
    "JSON between empty lines": (call("f", ("x", '\n\n{"a":[1,{"b":"</x>"}]}\n')),
        [("f", {"x": {"a": [1, {"b": "</x>"}]}}, True, ())]),
    "values of strings stay": (call("f", ("s", "null")) + call("f", ("s", "123")),
        [("f", {"s": "null"}, True, ()), ("f", {"s": "123"}, True, ())]),
    "an unknown function": (call("no", ("n", "5")), [call("no", ("n", "5"))]),
    "a value of no type": (call("f", ("n", "five")), [call("f", ("n", "five"))]),
    "a later value of no type": (call("f", ("s", "a"), ("n", "NaN"), ("b", "True")), [("f", {"s": "a", "b": True}, True, ("n",))]),
    "a name with a line feed": (call("f", ("\nn", "5")), [call("f", ("\nn", "5"))]),
    "a name that ends in =": (call("f", ("note=", "5")), [call("f", ("note=", "5"))]),
    "a name without an end": (
        "<tool_call>\n<function=f>\n<parameter=ids: [1]\n</parameter>\n</function>",
        ["<tool_call>\n<function=f>\n<parameter=ids: [1]\n</parameter>\n</function>"],
    ),
    "a later malformed name": (call("f", ("n", "5"), ("note=", "6"), ("s", "a")),
        [("f", {"n": 5, "s": "a"}, True, ("<parameter=note=>\n6",))]),
    "a parameter twice": (call("f", ("n", "5"), ("n", "6")), [("f", {"n": 5}, True, ("n",))]),
    "the tag alone": ("The tag <tool_call> opens one.", ["The tag <tool_call> opens one."]),
    "ended inside a later value": (call("f", ("n", "5"), ("s", "abc"))[:-40], [("f", {"n": 5}, False, ("s",))]),
    "not one closing tag": ("<tool_call>\n<function=now>\n", ["<tool_call>\n<function=now>\n"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_reported_cases(case: str):
    text, expected = CASES[case]
    for size in (len(text), 1, 2, 3, 7):
        assert parse([text[i : i + size] for i in range(0, len(text), size)]) == expected
    assert oracle(text, False) == expected


def test_a_cut_never_guesses_a_value():
    text = "On it.\n\n" + call("write", ("path", "New York City"), ("text", 'say("</parameter>") twice'))
    whole = {"path": "New York City", "text": 'say("</parameter>") twice'}
    for end in range(len(text)):
        found = [part for part in parse([text[:end]], cut=True) if not isinstance(part, str)]
        for name, arguments, complete, _ in found:
            assert name == "write" and arguments.items() <= whole.items()
            assert complete is (end >= text.index("</function>") + len("</function>"))
            assert not complete or arguments == whole
        assert bool(found) is (end >= text.index("write>") + len("write>"))


def test_arguments_come_while_later_ones_are_written():
    parser = CallParser(TOOLS)
    text = call("write", ("path", "a.py"), ("text", "x" * 1000))
    first = [event for character in text[: text.index("xxx")] for event in parser.push(character)]
    assert [type(event) for event in first] == [CallBegin, CallArguments, CallArguments]
    assert json.loads(first[1].delta + first[2].delta + "}") == {"path": "a.py"}


def test_only_what_may_become_a_call_is_held_back():
    parser = CallParser(TOOLS)
    assert parser.push("a b") == [ContentText("a b")]
    assert parser.push(" \n<tool") == []
    assert parser.push("box>") == [ContentText(" \n<toolbox>")]
    assert parser.push("<tool_call>x") == [ContentText("<tool_call>x")]
    assert CallParser({}).push("a <tool_call>\n<function=f>\n") == [ContentText("a <tool_call>\n<function=f>\n")]


def test_a_long_run_of_anything_is_read_in_good_time():
    # Degenerate answers: as many steps as pieces, each cheap. Quadratic steps of Python would take minutes.
    for piece in ("\n", "<", "<tool_call>\n", "</parameter>\n", "<tool_call><function=f><parameter=n>"):
        parser = CallParser(TOOLS)
        for _ in range(3000):
            parser.push(piece)
        parser.push("</parameter></function></tool_call>")
        parser.finish(False)


def test_twenty_one_tools_and_no_call():
    parser = CallParser({f"tool{i}": {} for i in range(21)})
    assert parser.push("Hi!") + parser.finish(False) == [ContentText("Hi!")]
