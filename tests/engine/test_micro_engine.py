"""What an engine does, on random weights of the smallest size: the tests of engines that `make check` runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer_jax import SamplingParams

pytestmark = pytest.mark.micro

PROMPT = [5, 900, 33, 17, 256, 80, 2] * 10  # more than one chunk
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7, top_p=0.95, frequency_penalty=0.2)


@pytest.fixture(autouse=True)
def nothing_is_left(micro_engine, micro_drafting):
    """Slots and pages are free when a test has ended."""
    yield
    for engine in (micro_engine, micro_drafting):
        assert engine.runner.busy == 0 and engine.runner.free_tokens == engine.runner.pool_tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_drafts_the_answer_is_that_without(micro_engine, micro_drafting, params):
    plain, drafted = (engine.generate(PROMPT, params) for engine in (micro_engine, micro_drafting))
    assert len(plain.tokens) == 40 and plain.finish_reason == "length"
    assert (drafted.tokens, drafted.text, drafted.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
    assert (plain.stats.rounds, plain.stats.drafted) == (39, 0)
    assert drafted.stats.drafted == drafted.stats.rounds == 39 - drafted.stats.accepted


def test_a_round_may_take_its_draft_and_may_refuse_it(micro_drafting):
    """Otherwise the comparison above would mean little."""
    stats = micro_drafting.generate(PROMPT, GREEDY).stats
    assert 0 < stats.accepted < stats.drafted


def test_a_stream_gives_the_answer_in_pieces(micro_drafting):
    whole = micro_drafting.generate(PROMPT, SAMPLED)
    *pieces, last = micro_drafting.stream(PROMPT, SAMPLED)
    assert len(pieces) > 10 and not any(piece.completion for piece in pieces)
    assert last.completion.tokens == whole.tokens == [token for piece in (*pieces, last) for token in piece.tokens]
    assert last.completion.text == whole.text == "".join(piece.text for piece in (*pieces, last))


def test_it_stops_at_a_string_and_at_a_token(micro_engine, micro_drafting):
    free = micro_engine.generate(PROMPT, SAMPLED)
    stop = next(free.text[at : at + 3] for at in range(8, 30) if free.text[at : at + 3].isascii())
    end = next(token for token in free.tokens[9:] if token not in free.tokens[:9])
    for engine in (micro_engine, micro_drafting):
        cut = engine.generate(PROMPT, replace(SAMPLED, stop=(stop,)))
        assert (cut.text, cut.finish_reason) == (free.text[: free.text.index(stop)], "stop")
        ended = engine.generate(PROMPT, replace(SAMPLED, stop_ids=(end,)))
        assert (ended.tokens, ended.finish_reason) == (free.tokens[: free.tokens.index(end) + 1], "stop")


def test_others_go_on_where_one_is_cancelled(micro_engine, micro_drafting):
    alone = [micro_engine.generate(PROMPT[:n], SAMPLED).tokens for n in (30, 64)]
    kept, dropped, waiting = (micro_drafting.stream(PROMPT[:n], SAMPLED) for n in (30, 70, 64))
    start = next(kept)
    next(dropped)
    assert micro_drafting.runner.busy == 2
    dropped.close()
    assert micro_drafting.runner.busy == 1
    answers = [[start, *kept][-1].completion, [*waiting][-1].completion]
    assert [answer.tokens for answer in answers] == alone


def test_more_requests_than_slots(micro_engine, micro_drafting):
    prompts = [PROMPT[n:] for n in range(5)]
    together = micro_drafting.generate_many(prompts, SAMPLED)
    assert [answer.tokens for answer in together] == [micro_engine.generate(prompt, SAMPLED).tokens for prompt in prompts]


def test_a_refusal_costs_nobody_anything(micro_drafting):
    expected = micro_drafting.generate(PROMPT, GREEDY).tokens
    stream = micro_drafting.stream(PROMPT, GREEDY)
    pieces = [next(stream)]
    for prompt, said in (([], "prompt is empty"), ([1088], "token id 1088"), ([1] * 300, "the context holds 256")):
        with pytest.raises(ValueError, match=said):
            micro_drafting.generate(prompt, GREEDY)
    pieces += stream
    assert pieces[-1].completion.tokens == expected
