"""Grammars over the real tokenizer's ids: what they allow, compared with validators; masks of draft rows, with single steps."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from ninfer_jax.text import Tokenizer, grammar
from ninfer_jax.text.grammar import GrammarError, Grammars, Matcher
from ninfer_jax.text.tools import AnswerParser, CallArguments, tool_plan

ROWS = 248_320
END = 248_046
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 3},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "function": {
            "name": "f",
            "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n"]},
        }
    },
    {"function": {"name": "now"}},
]
F = (
    "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n"
    "<parameter=s>\nimport x\n</p>\n\n</parameter>\n</function>\n</tool_call>"
)
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, ROWS, [END])


def admits(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text may be an answer, to its end."""
    ids = [*tokenizer.encode(text, allow_special=True), END]
    return matcher.accept(ids) == len(ids)


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_each_kind_admits_what_it_says(grammars: Grammars, tokenizer: Tokenizer):
    assert admits(grammars.matcher(grammar.json_object()), tokenizer, '{"a": [1, "x"]}') and not admits(
        grammars.matcher(grammar.json_object()), tokenizer, "[1]"
    )
    assert admits(grammars.matcher(grammar.regex("[ab]+")), tokenizer, "abab") and not admits(
        grammars.matcher(grammar.regex("[ab]+")), tokenizer, "abc"
    )
    assert admits(grammars.matcher(grammar.lark('start: "x" | "y"')), tokenizer, "y") and not admits(
        grammars.matcher(grammar.lark('start: "x" | "y"')), tokenizer, "xy"
    )
    for value in (
        {"name": "Ada", "age": 5},
        {"name": "é🦙", "age": 5, "tags": ["a"]},
        {"name": "x", "age": 2},
        {"age": 5},
        {"name": "x", "age": 9, "z": 1},
    ):
        fits = jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
        assert admits(grammars.matcher(grammar.json_schema(SCHEMA)), tokenizer, json.dumps(value, ensure_ascii=False)) is fits


def test_calls_follow_the_tools_and_are_read_back(grammars: Grammars, tokenizer: Tokenizer):
    plan = tool_plan(TOOLS, "required")
    assert admits(grammars.matcher(grammar.calls(plan)), tokenizer, F + "\n" + NOW) and not admits(
        grammars.matcher(grammar.calls(plan)), tokenizer, F + "x"
    )
    assert not admits(grammars.matcher(grammar.calls(plan)), tokenizer, F.replace("5", "five")) and not admits(
        grammars.matcher(grammar.calls(plan)), tokenizer, F.replace("=f", "=g")
    )
    assert not admits(grammars.matcher(grammar.calls(tool_plan(TOOLS, "required", False))), tokenizer, F + "\n" + NOW)
    named = tool_plan(TOOLS, {"type": "tool", "name": "now"})
    assert admits(grammars.matcher(grammar.calls(named)), tokenizer, NOW) and not admits(
        grammars.matcher(grammar.calls(named)), tokenizer, F
    )
    assert tokenizer.decode(grammars.matcher(grammar.calls(named)).forced(99)).startswith("<tool_call>\n<function")
    parser = AnswerParser(False, plan.callable)
    events = parser.push(F) + parser.finish()
    assert json.loads("".join(event.delta for event in events if isinstance(event, CallArguments))) == {
        "n": 5,
        "s": "import x\n</p>\n",
    }


def test_calls_that_may_come_follow_the_tools_behind_any_text(grammars: Grammars, tokenizer: Tokenizer):
    for many in (True, False):
        plan = tool_plan(TOOLS, "auto", many)
        for text, fits in (
            ("Hello.", True),
            ("", True),
            ("x < 3 <tool", True),
            (F, True),
            ("Let me see.\n\n" + F, True),
            (F + "\n" + NOW, many),
            ("Let me see." + F.replace("5", "five"), False),
            ("The tag <tool_call> is", False),
            (F + " Done.", False),
        ):
            assert admits(grammars.matcher(grammar.calls(plan)), tokenizer, text) is fits


def test_any_walk_through_the_masks_validates(grammars: Grammars, tokenizer: Tokenizer):
    rng, row = random.Random(3), np.zeros((1, grammars.words), np.uint32)
    plain = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1] + tokenizer.encode('"],"}:')
    for _ in range(8):
        matcher, ids = grammars.matcher(grammar.json_schema(SCHEMA)), []
        while not ids or ids[-1] != END:
            assert matcher.mask([], row) == 1
            choices = allowed(row[0])
            assert choices and max(choices) < tokenizer.vocab_size
            narrow = sorted(choices.intersection(plain))
            closing = sorted(choices.intersection([END, *tokenizer.encode('"'), *tokenizer.encode("}")]))
            ids.append(rng.choice(closing if closing and len(ids) > 30 else narrow or sorted(choices)))
            assert matcher.accept(ids[-1:]) == 1
        jsonschema.validate(json.loads(tokenizer.decode(ids)), SCHEMA)


def test_where_nothing_is_drafted_only_what_must_come_is(grammars: Grammars, tokenizer: Tokenizer):
    """As a round that found nothing to look up has it: -1 is no token, and what must come may take its place."""
    start, none = "and so on, ", [-1] * 16
    matcher, rows = grammars.matcher(grammar.regex(start + "[a-z]+")), np.zeros((17, grammars.words), np.uint32)
    found = matcher.guided(none)
    known = found.index(-1)
    assert known > 0 and start.startswith(tokenizer.decode(found[:known])) and found[known:] == none[known:]
    assert matcher.mask(found, rows) == known + 1 and (rows[known + 1 :] == 0xFFFFFFFF).all()
    rest = tokenizer.encode(start + "a")
    assert matcher.accept(rest) == len(rest) and matcher.guided(none) == none
    assert matcher.mask(none, rows) == 1 and not (rows[0] == 0xFFFFFFFF).all()


def test_rows_of_drafts_are_those_of_single_steps(grammars: Grammars, tokenizer: Tokenizer):
    ids = tokenizer.encode('{"name": "Ada Lovelace", "age": 36}')
    many, one = grammars.matcher(grammar.json_schema(SCHEMA)), grammars.matcher(grammar.json_schema(SCHEMA))
    rows, row = np.zeros((8, grammars.words), np.uint32), np.zeros((1, grammars.words), np.uint32)
    for at in range(len(ids) - 7):
        assert many.mask(ids[at : at + 7], rows) == 8
        again = grammars.matcher(grammar.json_schema(SCHEMA))
        assert again.accept(ids[:at]) == at
        for step in range(8):
            again.mask([], row)
            assert np.array_equal(rows[step], row[0])
            again.accept(ids[at + step : at + step + 1])
        assert many.accept(ids[at : at + 1]) == one.accept(ids[at : at + 1]) == 1
    many.rollback(3)
    assert many.legal(ids[len(ids) - 10 :]) == 10 and many.accept(ids[len(ids) - 10 :]) == 10


def test_behind_an_illegal_draft_everything_is_allowed_and_nothing_counts(grammars: Grammars, tokenizer: Tokenizer):
    matcher, rows = grammars.matcher(grammar.json_schema(SCHEMA)), np.zeros((4, grammars.words), np.uint32)
    good, bad = tokenizer.encode('{"name')[0], tokenizer.encode("no")[0]
    assert matcher.mask([good, bad, good], rows) == 2
    assert good in allowed(rows[0]) and bad not in allowed(rows[1]) and (rows[2:] == 0xFFFFFFFF).all()
    assert matcher.accept([good, bad]) == 1 and not matcher.error


def test_the_end_token_is_allowed_where_the_answer_may_end(grammars: Grammars, tokenizer: Tokenizer):
    matcher, row = grammars.matcher(grammar.regex("ab?")), np.zeros((1, grammars.words), np.uint32)
    matcher.mask([], row)
    assert END not in allowed(row[0]) and not matcher.satisfied
    matcher.accept(tokenizer.encode("a"))
    matcher.mask([], row)
    assert END in allowed(row[0]) and matcher.satisfied
    matcher.accept(tokenizer.encode("b"))
    matcher.mask([], row)
    assert allowed(row[0]) == {END} and matcher.legal([END]) == 1 and matcher.accept([END]) == 1 and matcher.accept([END]) == 0
    matcher.rollback(2)
    assert matcher.accept([*tokenizer.encode("b"), END]) == 2


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda g: g.matcher(grammar.regex("(")), "regex: "),
        (lambda g: g.matcher(grammar.regex("a" * (2 << 20))), "regex: has 2097152 characters, at most 1048576 are read"),
        (lambda g: g.matcher(grammar.regex(5)), "regex: must be a string"),
        (lambda g: g.matcher(grammar.lark("start: foo")), 'grammar: at 1(8): unknown name: "foo"'),
        (lambda g: g.matcher(grammar.json_schema([])), "response_format.json_schema.schema: must be an object"),
        (lambda g: g.matcher(grammar.json_schema({"type": "objekt"})), "response_format.json_schema.schema: Invalid type: objekt"),
        (lambda g: g.matcher(grammar.json_schema({"not": {"const": 1}})),
            'response_format.json_schema.schema: Unimplemented keys: ["not"]'),
        (lambda g: g.matcher(grammar.json_schema({"$ref": "#/nowhere"})), "response_format.json_schema.schema: "),
        (lambda g: g.matcher(grammar.json_schema({"enum": [float("nan")]})), "response_format.json_schema.schema.enum[0]: nan"),
        (lambda g: g.matcher(grammar.json_schema({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}]})),
            "response_format.json_schema.schema: "),
        (lambda g: g.matcher(grammar.calls(tool_plan())), "tools: there are none that may be called"),
        (lambda g: g.matcher(grammar.calls(tool_plan([{"function": {"name": "f", "parameters": {"properties": {"a>": {}}}}}]))),
            "tools: the parameter 'a>'"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_that_names_the_field(grammars: Grammars, make, error: str):
    with pytest.raises(GrammarError, match=re.escape(error)) as refused:
        make(grammars)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("pattern", ["(a{1,1000}){1,1000}", "((a|b|ab)*c?){1,300}d", "(a*)*(a*)*(a*)*$", "(.*a){40}[^z]{1,9999}"])
def test_a_grammar_that_explodes_ends_by_its_limits(grammars: Grammars, tokenizer: Tokenizer, pattern: str):
    try:
        matcher = grammars.matcher(grammar.regex(pattern))
    except GrammarError:
        return
    row = np.zeros((1, grammars.words), np.uint32)
    for token in tokenizer.encode("ab" * 40 + "a" * 400):
        matcher.mask([], row)
        assert row.any()
        if matcher.accept([token]) != 1:
            break
