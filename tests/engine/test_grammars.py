"""Answers under grammars, from the bundled model: they validate, drafts change nothing, and nobody beside them notices."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from scipy.special import log_softmax

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.text import grammar
from ninfer_jax.text.grammar import GrammarError
from ninfer_jax.text.tools import AnswerParser, CallArguments, tool_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from schemas import KINDS, schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 3, "maximum": 150},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PROMPT = "Give me JSON.\n"
ASK = [{"role": "user", "content": "Where is it warm?"}]
TOOL = {
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    }
}
RULES = 60
# So many rules begin at each place that the parser's limit of them is reached within some tokens.
ENDLESS = 'start: r0 "!"\n' + "\n".join(
    f"r{i}: r{(i + 1) % RULES} r{(i + 7) % RULES} | r{(i + 1) % RULES} | /[ab]/" for i in range(RULES)
)


def under(rules: grammar.Grammar, **settings: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_new_tokens": 200, "grammar": rules, **settings})


def drawn(index: int) -> SamplingParams:
    """Schema `index`, half of them sampled, some with penalties or logprobs, which take other ways through the draw."""
    more = [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 20}, {"repetition_penalty": 1.1, "logprobs": 1}][index // 8 % 4]
    return under(grammar.json_schema(schema(index)[1]), seed=index, **more)


@pytest.fixture(scope="module")
def answers(draft_engine: Engine):
    before = draft_engine.compilations
    found = draft_engine.generate_many([PROMPT] * 64, [drawn(i) for i in range(64)])
    assert draft_engine.compilations == before
    return found


def test_answers_of_many_schemas_validate(answers):
    kinds = set()
    for index, answer in enumerate(answers):
        kind, wanted = schema(index)
        assert not answer.error and answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            jsonschema.Draft202012Validator(wanted).validate(json.loads(answer.text))
            kinds.add(kind)
    assert kinds == set(KINDS) and sum(a.finish_reason == "stop" for a in answers) > 60


def test_forced_spans_are_drafts_that_are_right(answers):
    rounds = sum(a.stats.rounds for a in answers)
    assert sum(a.stats.accepted for a in answers) > 0.3 * sum(a.stats.drafted for a in answers) > 0
    assert sum(len(a.tokens) for a in answers) > 1.5 * rounds


def test_drafts_change_no_token_under_a_grammar(answers, plain_engine: Engine):
    for index in (*range(8), 9, 18, 27, 36, 45, 54):
        alone = plain_engine.generate(PROMPT, drawn(index))
        assert (alone.tokens, alone.finish_reason) == (answers[index].tokens, answers[index].finish_reason)


def test_those_beside_have_the_tokens_they_have_alone(draft_engine: Engine):
    free = [
        SamplingParams(temperature=0, max_new_tokens=60),
        SamplingParams(temperature=0.9, seed=4, top_k=30, max_new_tokens=60),
        SamplingParams(temperature=1.1, seed=5, max_new_tokens=60, logprobs=2),
    ]
    guided = under(grammar.json_schema(SCHEMA))
    alone = [draft_engine.generate("ROMEO.\n", params) for params in (*free, guided)]
    order = [guided, free[0], guided, free[1], guided, free[2], guided]
    for params, found in zip(order, draft_engine.generate_many(["ROMEO.\n"] * 7, order), strict=True):
        expected = alone[[*free, guided].index(params)]
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_log_probabilities_are_those_of_the_model_without_the_grammar(draft_engine: Engine):
    answer = draft_engine.generate(PROMPT, under(grammar.json_schema(SCHEMA), logprobs=3))
    ids = draft_engine.tokenizer.encode(PROMPT)
    expected = log_softmax(draft_engine.score(ids + answer.tokens).astype(np.float64), axis=-1)
    for at, entry in enumerate(answer.logprobs or []):
        row = expected[len(ids) - 1 + at]
        assert entry.token == answer.tokens[at] and abs(entry.logprob - row[entry.token]) < 1e-3
        assert {token for token, _ in entry.top} == set(np.argsort(-row)[:3].tolist())
    # The first token that a model of plays would say is no brace.
    assert answer.logprobs and answer.logprobs[0].token != answer.logprobs[0].top[0][0]


def test_the_grammar_begins_behind_the_reasoning(draft_engine: Engine, plain_engine: Engine):
    params = under(grammar.regex("[a-f]{3}(, [a-f]{3}){2}"), temperature=0.9, seed=2, max_new_tokens=300)
    answer = draft_engine.generate(ASK, params, enable_thinking=True)
    assert len(answer.reasoning) > 20 and re.fullmatch("[a-f]{3}(, [a-f]{3}){2}", answer.text) and answer.finish_reason == "stop"
    text = draft_engine.tokenizer.decode(answer.tokens)
    assert "</think>\n\n" + answer.text in text
    assert plain_engine.generate(ASK, params, enable_thinking=True).tokens == answer.tokens
    without = draft_engine.generate(ASK, params, enable_thinking=False)
    assert re.fullmatch("[a-f]{3}(, [a-f]{3}){2}", without.text) and not without.reasoning


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_come_and_fit_their_schema(draft_engine: Engine, choice: object):
    plan = tool_plan([TOOL, {"function": {"name": "clock"}}], choice)
    params = under(grammar.calls(plan), temperature=0.9, seed=3)
    answer = draft_engine.generate(ASK, params, tools=plan.rendered, enable_thinking=False)
    parser = AnswerParser(False, plan.callable)
    events = parser.push(answer.text) + parser.finish()
    assert answer.finish_reason == "stop" and parser.outcome is not None and parser.outcome.reason == "tool_calls"
    if choice != "required":
        arguments = json.loads("".join(event.delta for event in events if isinstance(event, CallArguments)).partition("}")[0] + "}")
        jsonschema.validate(arguments, TOOL["function"]["parameters"])


def test_an_answer_that_reaches_a_limit_ends_alone(draft_engine: Engine):
    beside = SamplingParams(temperature=0, max_new_tokens=40)
    alone = draft_engine.generate("ROMEO.\n", beside)
    # Without the exclamation mark the grammar never lets it end.
    endless = under(grammar.lark(ENDLESS), logit_bias={draft_engine.tokenizer.encode("!")[0]: -1e4})
    stuck, other = draft_engine.generate_many(["ROMEO.\n"] * 2, [endless, beside])
    assert stuck.finish_reason == "grammar" and "max is 2000" in stuck.error and "\n" not in stuck.error
    assert other.tokens == alone.tokens and draft_engine.runner.busy == 0
    assert draft_engine.generate("ROMEO.\n", beside).tokens == alone.tokens


def test_a_budget_too_short_ends_by_length(draft_engine: Engine):
    answer = draft_engine.generate(PROMPT, under(grammar.json_schema(SCHEMA), max_new_tokens=5))
    assert answer.finish_reason == "length" and len(answer.tokens) == 5 and not answer.error and answer.text.startswith('{"name"')


def test_what_cannot_be_followed_is_refused_before_anything_is_queued(draft_engine: Engine):
    for rules, words in (
        (grammar.regex("("), "regex: "),
        (grammar.lark("start: foo"), 'grammar: at 1(8): unknown name: "foo"'),
        (grammar.json_schema({"type": "objekt"}), "response_format.json_schema.schema: Invalid type: objekt"),
    ):
        with pytest.raises(GrammarError, match=re.escape(words)) as refused:
            draft_engine.stream(PROMPT, under(rules))
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="ignore_eos: an answer with a grammar ends where the grammar does"):
        under(grammar.json_object(), ignore_eos=True)
    with pytest.raises(ValueError, match="grammar is {'type': 'json_object'}, it must be made by ninfer_jax.text.grammar"):
        under({"type": "json_object"})  # type: ignore[arg-type]
    assert not draft_engine.runner.live and draft_engine.runner.busy == 0


def test_a_stop_string_ends_an_answer_inside_its_grammar(draft_engine: Engine):
    whole = draft_engine.generate(PROMPT, under(grammar.json_schema(SCHEMA)))
    cut = draft_engine.generate(PROMPT, replace(under(grammar.json_schema(SCHEMA)), stop=('"age"',)))
    assert cut.finish_reason == "stop" and whole.text.startswith(cut.text) and cut.text.endswith(", ")


def test_without_a_tokenizer_a_grammar_is_refused(micro_path: Path):
    from ninfer_jax.engine.requests import Requests
    from ninfer_jax.text import open_text

    assert EngineConfig(tokenizer=None).tokenizer is None
    requests = Requests(open_text(micro_path, 1088, None), 256, 1024, 1088)
    with pytest.raises(GrammarError, match=re.escape("grammar: needs texts, and the engine was loaded without a tokenizer")):
        requests.sequence([1, 2], under(grammar.json_object()), {})
