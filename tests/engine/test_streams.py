"""Several completions at once: they share slots and pages, and none of them notices."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from ninfer_jax import SamplingParams
from ninfer_jax.engine import Completion

PROMPTS = ("KING.\nMy lord, ", "def read(self", "HAMLET.\n", "import os\n", "Enter two ")


def params(seed: int, length: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_new_tokens=length, ignore_eos=True)


REQUESTS = [(prompt, params(seed, length)) for seed, (prompt, length) in enumerate(zip(PROMPTS, (30, 5, 41, 1, 17), strict=True))]


@pytest.fixture(scope="module")
def alone(plain_engine) -> list[Completion]:
    """Each request by itself, without drafts."""
    return [plain_engine.generate(*request) for request in REQUESTS]


@pytest.fixture
def idle(draft_engine):
    """Checks that the two slots and all pages are free."""

    def check() -> None:
        assert draft_engine.runner.busy == 0
        assert draft_engine.runner.free_tokens == draft_engine.runner.pool_tokens == 1024

    check()
    return check


def same(ours: Completion, theirs: Completion) -> bool:
    return (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason)


def test_many_prompts_keep_their_order(draft_engine, alone, idle):
    prompts, each = zip(*REQUESTS, strict=True)
    for ours, theirs in zip(draft_engine.generate_many(prompts, each), alone, strict=True):
        assert same(ours, theirs)
    idle()


def test_one_setting_for_all_prompts(draft_engine, plain_engine):
    setting = params(3, 6)
    together = draft_engine.generate_many(PROMPTS, setting)
    assert [c.tokens for c in together] == [plain_engine.generate(p, setting).tokens for p in PROMPTS]


@pytest.mark.parametrize("count", [2, 5], ids=["as many as slots", "more than slots"])
def test_streams_read_alternately(draft_engine, alone, idle, count):
    """Also those that end while another one is being read."""
    streams = [draft_engine.stream(*request) for request in REQUESTS[:count]]
    pieces = [[piece for piece in column if piece] for column in zip(*zip_longest(*streams), strict=True)]
    for ours, theirs in zip(pieces, alone, strict=False):
        assert same(ours[-1].completion, theirs)
        assert "".join(piece.text for piece in ours) == theirs.text
        assert [token for piece in ours for token in piece.tokens] == theirs.tokens
    idle()


def test_a_stream_may_end_while_another_is_read(draft_engine, alone, idle):
    first = draft_engine.stream(*REQUESTS[1])
    start = next(first)
    second = list(draft_engine.stream(*REQUESTS[2]))
    assert same(second[-1].completion, alone[2])
    rest = list(first)
    assert same(rest[-1].completion, alone[1])
    assert [token for piece in (start, *rest) for token in piece.tokens] == alone[1].tokens
    idle()


def test_an_abandoned_stream_frees_its_place(draft_engine, alone, idle):
    kept, closed, dropped = (draft_engine.stream("x", params(0, 400)) for _ in range(3))
    next(kept), next(closed)
    assert draft_engine.runner.busy == 2
    closed.close()
    assert draft_engine.runner.busy == 1
    next(dropped)
    del dropped
    assert draft_engine.runner.busy == 1
    kept.close()
    idle()
    assert same(draft_engine.generate(*REQUESTS[0]), alone[0])


def test_a_waiting_stream_can_be_abandoned(draft_engine, idle):
    running = [draft_engine.stream("x", params(0, 400)) for _ in range(2)]
    for stream in running:
        next(stream)
    short = draft_engine.stream("y", params(0, 5))
    short.close()  # never started
    for stream in running:
        stream.close()
    idle()


def test_an_exception_in_a_callback_frees_the_slot(draft_engine, alone, idle):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draft_engine.generate(list(range(100)), params(0, 5), on_prefill=interrupt)
    idle()
    assert same(draft_engine.generate(*REQUESTS[0]), alone[0])


def test_a_bad_request_hurts_nobody(draft_engine, alone, idle):
    stream = draft_engine.stream(*REQUESTS[0])
    first = next(stream)
    for bad in (
        "",
        [],
        [99_999],
        [-1],
        [1.5],
        [True],
        {"a": 1},
        None,
        [[1, 2]],
        list(range(512)),
        [{"role": "cook", "content": "x"}],
    ):
        with pytest.raises(ValueError):
            draft_engine.generate(bad, params(0, 5))
    with pytest.raises(ValueError, match="prompt is empty"):
        draft_engine.generate_many(["good", ""], params(0, 5))
    with pytest.raises(ValueError, match="params has 1 entries for 2 prompts"):
        draft_engine.generate_many(["good", "good"], [params(0, 5)])
    pieces = [first, *stream]
    assert same(pieces[-1].completion, alone[0])
    idle()


def test_scoring_beside_a_running_stream(draft_engine, plain_engine, alone, idle):
    ids = draft_engine.tokenizer.encode("To be, or not to be, that is the question")
    stream = draft_engine.stream(*REQUESTS[2])
    pieces = [next(stream)]
    beside = draft_engine.score(ids)
    pieces += stream
    assert same(pieces[-1].completion, alone[2])
    assert abs(beside - plain_engine.score(ids)).max() < 1e-3
    idle()


def test_scoring_needs_a_free_slot(plain_engine):
    stream = plain_engine.stream("x", params(0, 20))
    next(stream)
    with pytest.raises(ValueError, match="score: no slot or not enough pages are free"):
        plain_engine.score([1, 2, 3])
    stream.close()
    assert plain_engine.score([1, 2, 3]).shape == (3, 1088)
