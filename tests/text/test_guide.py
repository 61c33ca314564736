"""A guide's masks and drafts, row by row: free reasoning, forced framing, then the grammar's own."""

import re

import numpy as np
import pytest

from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.text import Tokenizer, grammar
from ninfer_jax.text.grammar import GrammarError, Grammars
from ninfer_jax.text.guide import Guide

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_dir(tiny_path())


@pytest.fixture(scope="module")
def guide(tiny: Tokenizer):
    grammars = Grammars(tiny, tiny.vocab_size + 40, tiny.eos_ids())
    return lambda rules, reasoning=False: Guide(grammars.matcher(rules), tiny, reasoning)


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_reasoning_is_free_until_its_tag_and_the_framing_is_forced(guide, tiny: Tokenizer):
    close, framing = tiny.control_tokens["</think>"], tiny.encode("\n\n")
    words, a = tiny.encode("so"), tiny.encode("a")[0]
    under = guide(grammar.regex("aaa"), True)
    assert under.plan(words * 3) is None
    planned = under.plan([words[0], close, 5, 6, 7, 8])
    assert planned is not None
    rows, drafts = planned
    after = [*framing, a]
    assert drafts.tolist()[:2] == [words[0], close] and drafts.tolist()[2 : 2 + len(framing)] == framing
    assert all((row == 0xFFFFFFFF).all() for row in rows[:2])
    for row, token in zip(rows[2:], after, strict=False):
        assert allowed(row) >= {token} and len(allowed(row)) <= 3  # a, aa, aaa
    under.accept([*words, close], True)
    under.accept(framing)
    planned = under.plan([0, 0])
    assert planned is not None and a in allowed(planned[0][0]) and not under.error
    under.accept(tiny.encode("aaa"))
    planned = under.plan([0, 0])
    assert planned is not None and allowed(planned[0][0]) == set(tiny.eos_ids()) and not under.error


def test_what_is_forced_takes_the_place_of_what_was_guessed(guide, tiny: Tokenizer):
    under, forced = guide(grammar.json_schema(SCHEMA)), tiny.encode('{"name": "')
    planned = under.plan([7] * len(forced))
    assert planned is not None
    rows, drafts = planned
    same = next((i for i, (a, b) in enumerate(zip(drafts, forced, strict=True)) if a != b), len(forced))
    assert same > 2 and tiny.decode(drafts.tolist()[:same]) == '{"name": "'[: len(tiny.decode(drafts.tolist()[:same]))]
    for at in range(same):
        assert drafts[at] in allowed(rows[at]) and 7 not in allowed(rows[at])
    # Where nothing was guessed, nothing is, unless it is forced.
    assert guide(grammar.regex("[ab]{9}")).plan([-1, -1])[1].tolist() == [-1, -1]
    # A guess that the grammar takes stays where nothing is forced.
    under.accept(drafts.tolist()[:same])
    planned = under.plan(tiny.encode("y"))
    assert planned is not None and (planned[1].tolist() == tiny.encode("y") or planned[1][0] in allowed(planned[0][0]))


def test_one_plan_after_another_is_the_plan_of_single_rows(guide, tiny: Tokenizer):
    under, single = guide(grammar.json_schema(SCHEMA)), guide(grammar.json_schema(SCHEMA))
    planned = under.plan([3] * 6)
    assert planned is not None
    for row, token in zip(planned[0], [*planned[1].tolist(), None], strict=True):
        alone = single.plan([])
        assert alone is not None and np.array_equal(alone[0][0], row)
        if token is None or token not in allowed(row):
            break
        single.accept([token])


def test_reasoning_closed_by_spelled_text_is_an_error(guide, tiny: Tokenizer):
    under = guide(grammar.regex("aaa"), True)
    under.accept(tiny.encode("so</think>"), in_reasoning=False)
    assert under.error == "the reasoning was closed by text that spells </think>"


def test_a_token_that_the_grammar_forbids_is_an_error(guide, tiny: Tokenizer):
    under = guide(grammar.regex("aaa"))
    under.accept(tiny.encode("ab"))
    assert under.error == "what the grammar forbids was drawn"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (5, "response_format: must be an object with a type"),
        ({"type": "xml"}, "response_format.type: 'xml' is unknown, allowed are text, json_object, json_schema, regex, lark"),
        ({"type": "json_schema"}, "response_format.json_schema: must be an object with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "response_format.json_schema.schema: must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": False}}, "response_format.json_schema.schema: false admits nothing"),
        ({"type": "regex"}, "response_format.pattern: must be a string"),
        ({"type": "lark", "grammar": None}, "response_format.grammar: must be a string"),
    ],
)
def test_response_formats_are_refused_by_field(value: object, error: str):
    with pytest.raises(GrammarError, match=re.escape(error)):
        grammar.response_format(value)


def test_response_formats_are_the_grammars_they_name():
    assert grammar.response_format({"type": "text"}) is None
    assert grammar.response_format({"type": "json_object"}) == grammar.json_object()
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert grammar.response_format(asked) == grammar.json_schema(SCHEMA)
    assert grammar.response_format({"type": "regex", "pattern": "a+"}) == grammar.regex("a+", "response_format.pattern")
    assert hash(grammar.lark('start: "a"')) == hash(grammar.lark('start: "a"'))
