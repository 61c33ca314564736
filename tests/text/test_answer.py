"""A whole answer: reasoning, content, calls, stop strings and how it ended, for every way of cutting the text."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax.text.tools import (
    CLOSE_REASONING,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Outcome,
    ReasoningText,
)

TOOLS = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"


def answer(pieces: list[str], cut: bool = False, start: bool = True, **options) -> tuple[str, str, list, Outcome]:
    parser = AnswerParser(start, TOOLS, **options)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(cut)
    assert parser.done and parser.outcome is not None and parser.push("more") == parser.finish() == []
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    calls = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.delta
        elif isinstance(event, CallEnd):
            calls[event.index] = (calls[event.index][0], json.loads(calls[event.index][1]), event.complete)
    return reasoning, content, calls, parser.outcome


F = ("f", {"n": 5}, True)
CASES = {
    "reasoning, prose, a call": ("why\n</think>\n\nOn it.\n\n" + CALL, ("why", "On it.", [F], Outcome("tool_calls", calls=1))),
    "a call right behind the reasoning": ("why\n</think>\n\n" + CALL, ("why", "", [F], Outcome("tool_calls", calls=1))),
    "a call inside reasoning, at its end": ("why\n\n" + CALL + "\n", ("why", "", [F], Outcome("tool_calls", calls=1))),
    "two of them": (CALL + "\n" + CALL, ("", "", [F, F], Outcome("tool_calls", calls=2))),
    "a call only thought of": (f"I could {CALL}\n</think>\n\nNo.", (f"I could {CALL}", "No.", [], Outcome("stop"))),
    "thought of, then called": (f"I {CALL} so\n{CALL}", (f"I {CALL} so", "", [F], Outcome("tool_calls", calls=1))),
    "thought of, then text": (f"I {CALL}\nor", (f"I {CALL}\nor", "", [], Outcome("length", unanswered=True, in_reasoning=True))),
    "the tag twice": ("why\n</think>\n</think>\n\nso", ("why", "so", [], Outcome("stop"))),
    "the turn ends inside reasoning": ("why", ("why", "", [], Outcome("length", unanswered=True, in_reasoning=True))),
    "the turn ends behind reasoning": ("why\n</think>\n\n", ("why", "", [], Outcome("stop", unanswered=True))),
    "a malformed call": ("</think><tool_call>\nf(5)", ("", "<tool_call>\nf(5)", [], Outcome("stop", malformed=1))),
    "ended inside a value": (
        "</think>" + CALL.replace("</function>", "<parameter=s>\nabc")[:-12],
        ("", "", [("f", {"n": 5}, False)], Outcome("length", calls=1, incomplete=1)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reported_cases_for_every_cut(case: str):
    text, expected = CASES[case]
    for size in (len(text), 1, 2, 3, 7):
        assert answer([text[i : i + size] for i in range(0, len(text), size)]) == expected


CUT = {
    "inside reasoning": ("wh", ("wh", "", [], Outcome("length", in_reasoning=True))),
    "inside a call in reasoning": (CALL[:-30], (CALL[:-30], "", [], Outcome("length", in_reasoning=True))),
    "inside content": ("</think>so", ("", "so", [], Outcome("length"))),
    "inside a call": ("</think>" + CALL[:45], ("", "", [("f", {}, False)], Outcome("length", calls=1, incomplete=1))),
    "behind a call": ("</think>" + CALL, ("", "", [F], Outcome("length", calls=1))),
}


@pytest.mark.parametrize("case", CUT)
def test_what_was_cut_is_reported_as_length(case: str):
    text, expected = CUT[case]
    assert answer([text], cut=True) == answer(list(text), cut=True) == expected


def test_thinking_switched_off_and_cut_is_content():
    assert answer(["The ans"], cut=True, start=False) == ("", "The ans", [], Outcome("length"))


PIECES = [
    "why",
    "\n",
    "\n\n",
    " ",
    "<think>",
    "</think>",
    "</thi",
    CALL,
    CALL[:40],
    "STOP",
    "ST",
    "so",
    "<tool_call>",
    "</tool_call>",
]


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.randoms(),
)
def test_any_cut_of_any_text_gives_one_result(text: str, cut: bool, start: bool, most: int | None, rng: random.Random):
    def run(pieces: list[str]) -> tuple:
        return answer(pieces, cut, start, max_calls=most, stop=["STOP"])

    whole = run([text])
    places = sorted(rng.randrange(len(text) + 1) for _ in range(5))
    assert run(list(text)) == run([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]) == whole
    _, content, calls, outcome = whole
    # Nothing is lost in silence, and no unfinished answer passes for a whole one.
    assert outcome.reason in ("stop", "length", "tool_calls")
    assert (outcome.reason == "tool_calls") <= (len(calls) > 0 and all(complete for *_, complete in calls))
    assert not (outcome.reason == "stop" and not content.strip() and not calls) or outcome.unanswered or outcome.stop
    assert not (outcome.unanswered and (content.strip() or calls))


def test_without_tools_nothing_is_a_call():
    parser = AnswerParser(True)
    events = parser.push(f"a {CALL}\n</think>\n\n{CALL}") + parser.finish()
    assert events == [ReasoningText(f"a {CALL}"), ContentText(CALL)] and parser.outcome == Outcome("stop")


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "stop"),
    [
        ("a STOP b\n</think>\n\nc STOP d", "a STOP b", "c ", "STOP"),  # not in reasoning
        ("</think>" + CALL.replace(">\n5", ">\n5").replace("=n", "=s").replace("5", "STOP"), "", "", None),  # nor in a call
        ("</think>a ST" + CALL + "OP", "", "a STOP", None),  # nor across one
        ("</think>STOP", "", "", "STOP"),
    ],
)
def test_stop_strings_stop_content_alone(text: str, reasoning: str, content: str, stop: str | None):
    for pieces in ([text], list(text)):
        found = answer(pieces, stop=["STOP"])
        assert found[:2] == (reasoning, content) and found[3].stop == stop


def test_nothing_follows_a_stop_string_and_the_reader_is_told_at_once():
    parser = AnswerParser(False, TOOLS, ["STOP"])
    assert parser.push("a STOP" + CALL) == [ContentText("a ")] and parser.done
    assert parser.push(CALL) == parser.finish(cut=True) == []
    assert parser.outcome == Outcome("stop", stop="STOP")


def test_one_call_only():
    reasoning, content, calls, outcome = answer(["</think>", CALL + "\n" + CALL + "\nmore"], max_calls=1)
    assert (reasoning, content, calls, outcome) == ("", "", [F], Outcome("tool_calls", calls=1))


def test_a_turn_that_ends_inside_reasoning_can_go_on():
    parser = AnswerParser(True, TOOLS)
    events = parser.push("why\n")
    assert parser.open_reasoning and parser.in_reasoning
    events += parser.push(CLOSE_REASONING)
    assert not parser.open_reasoning
    events += parser.push("so") + parser.finish()
    assert events == [ReasoningText("why"), ContentText("so")] and parser.outcome == Outcome("stop")


def test_a_call_inside_reasoning_needs_no_going_on():
    parser = AnswerParser(True, TOOLS)
    assert parser.push("why\n" + CALL) == [ReasoningText("why")]
    assert parser.in_reasoning and not parser.open_reasoning
