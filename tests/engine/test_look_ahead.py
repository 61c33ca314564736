"""A round started before the last one's tokens are read changes no answer, whoever ends in between."""

from dataclasses import replace

import pytest

from ninfer_jax import SamplingParams
from ninfer_jax.engine.runner import Runner

GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


def answers(engine):
    """Five requests over two slots; one ends inside by a stop string, one is abandoned while its next round runs."""
    plain = engine.generate("ROMEO.\n", GREEDY)
    word = plain.text.split()[2]
    requests = [
        GREEDY,
        replace(GREEDY, stop=(word,)),
        replace(GREEDY, max_new_tokens=7),
        replace(GREEDY, temperature=0.8, seed=3),
        GREEDY,
    ]
    stream = engine.stream("JULIET.\n", GREEDY)
    next(stream)
    stream.close()
    prompts = ["ROMEO.\n", "ROMEO.\n", "def f(", "class A:\n", "HAMLET.\n"]
    return [(c.tokens, c.finish_reason, c.stats.rounds) for c in engine.generate_many(prompts, requests)]


def test_answers_and_rounds_are_those_of_reading_every_round_first(draft_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Runner.look_ahead
    ahead = answers(draft_engine)
    monkeypatch.setattr(Runner, "look_ahead", False)
    assert ahead == answers(draft_engine)
    assert ahead[1][1] == "stop" and len(ahead[1][0]) < len(ahead[0][0])
    assert draft_engine.runner.busy == 0 and draft_engine.runner.free_tokens == draft_engine.runner.pool_tokens
