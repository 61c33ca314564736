"""Answers under many JSON schemas, each validated, and how many drafts are accepted with masks and without.

    python benchmarks/grammars.py [--schemas 1000] [--model tiny] [--draft 3] [--context 512]

The schemas are `schemas.py`'s: objects, enums, patterns, recursion, unions, numbers in ranges, arrays, nesting. Every second
eight are sampled at 0.8, the others greedy. Exits with 1 where an answer that ended does not validate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import contextmanager
from typing import Any

import jsonschema
from schemas import schema

from ninfer_jax import Completion, Engine, EngineConfig, SamplingParams
from ninfer_jax.text import grammar
from ninfer_jax.text.grammar import Matcher

PROMPT = "Give me JSON.\n"


def params(index: int, budget: int, *, masks: bool) -> SamplingParams:
    rules = grammar.json_schema(schema(index)[1]) if masks else None
    return SamplingParams(temperature=index // 8 % 2 * 0.8, seed=index, max_new_tokens=budget, grammar=rules)


@contextmanager
def only_proposed() -> Any:
    """Drafts as the MTP head proposes them, whatever the grammar forces."""
    forced, Matcher.guided = Matcher.guided, lambda self, drafts: list(drafts)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Matcher.guided = forced  # type: ignore[method-assign]


def run(engine: Engine, asked: list[SamplingParams], name: str) -> list[Completion]:
    """The answers, with a line about them."""
    start, found = time.perf_counter(), []
    for at in range(0, len(asked), 50):
        some = asked[at : at + 50]
        found += engine.generate_many([PROMPT] * len(some), some)
    seconds, tokens = time.perf_counter() - start, sum(len(c.tokens) for c in found)
    rounds, drafted, accepted = (sum(getattr(c.stats, name) for c in found) for name in ("rounds", "drafted", "accepted"))
    ends = ", ".join(f"{count} {reason}" for reason, count in Counter(c.finish_reason for c in found).most_common())
    print(
        f"{name}: {len(found)} answers ({ends}), {tokens} tokens in {seconds:.0f} s, "
        f"{accepted / max(drafted, 1):.1%} of drafts accepted, {tokens / max(rounds, 1):.2f} tokens a round",
        flush=True,
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--draft", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    budget = options.context - 64
    engine = Engine.load(options.model, EngineConfig(context=options.context, slots=2, draft=options.draft, kv="f32"))
    compiled = engine.compilations

    answers = run(engine, [params(i, budget, masks=True) for i in range(options.schemas)], "masks and forced drafts")
    wrong = Counter[str]()
    kinds = Counter[str]()
    for index, answer in enumerate(answers):
        kind, wanted = schema(index)
        if answer.finish_reason != "stop":
            continue
        kinds[kind] += 1
        if not jsonschema.Draft202012Validator(wanted).is_valid(json.loads(answer.text)):
            wrong[kind] += 1
            print(f"schema {index} does not admit {answer.text}")
    print("ended, by kind: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    print(
        f"answers that ended and do not validate: {wrong.total()}; programs compiled in service: {engine.compilations - compiled}"
    )
    with only_proposed():
        again = run(engine, [params(i, budget, masks=True) for i in range(options.schemas)], "masks, drafts of the MTP head alone")
    assert [c.tokens for c in again] == [c.tokens for c in answers]
    # As long as the answers under masks, so that the same number of tokens is compared.
    lengths = [max(2, len(c.tokens)) for c in answers]
    run(engine, [params(i, lengths[i], masks=False) for i in range(options.schemas)], "no masks")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
