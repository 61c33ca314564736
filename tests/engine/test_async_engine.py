"""The engine for many callers: answers are those of one caller, whoever else is there, whatever fails, and however they are read."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ninfer_jax import AnswerLost, AsyncEngine, EngineStopped, QueueFull, SamplingParams
from ninfer_jax.engine import sequence as sequence_module

pytestmark = pytest.mark.micro

LENGTHS = (3, 70, 20, 130, 64, 200, 1, 90)
PROMPTS = [np.random.default_rng(seed).integers(0, 1000, length).tolist() for seed, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PARAMS = [
    replace(GREEDY, temperature=0.9 * (at % 2), seed=at, max_new_tokens=5 + 3 * at, logprobs=2 if at % 3 == 0 else None)
    for at in range(len(LENGTHS))
]
LONG = replace(GREEDY, max_new_tokens=180)


@pytest.fixture(scope="module")
def right(micro_engine) -> list:
    """Each request alone, without drafts, by the blocking engine."""
    return [micro_engine.generate(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture
def shared(micro_drafting):
    """Two slots, one draft; all of it is free again when a test has ended."""
    engine = AsyncEngine(micro_drafting, queue=30)
    yield engine
    assert engine.close(timeout=60)
    runner = micro_drafting.runner
    assert runner.busy == 0 and runner.free_tokens == runner.pool_tokens and not runner.live


def same(ours, theirs) -> bool:
    return (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason)


def drained(runner) -> None:
    """Wait until nothing is under way; fails rather than hangs."""
    for _ in range(3000):
        if not runner.live and runner.busy == 0:
            return
        time.sleep(0.01)
    raise AssertionError("requests are still under way")


def test_answers_to_several_threads_are_those_of_one_caller(shared, right):
    def ask(at: int):
        pieces = list(shared.submit(PROMPTS[at], PARAMS[at]))
        done = pieces[-1].completion
        assert [t for piece in pieces for t in piece.tokens] == done.tokens
        assert "".join(piece.text for piece in pieces) == done.text
        assert [entry for piece in pieces for entry in piece.logprobs] == (done.logprobs or [])
        return done

    order = list(range(len(PROMPTS))) * 3
    with ThreadPoolExecutor(6) as threads:
        for at, done in zip(order, threads.map(ask, order), strict=True):
            assert same(done, right[at])
            assert (done.logprobs is None) == (right[at].logprobs is None)
            stats = done.stats
            assert 0 <= stats.queue_s <= stats.first_token_s and stats.cached_tokens == 0
            assert stats.prefill_s <= stats.first_token_s


def test_answers_in_an_event_loop(shared, right):
    async def ask(at: int):
        running = shared.submit(PROMPTS[at], PARAMS[at])
        if at % 2:
            return await running.wait()
        pieces = [piece async for piece in running]
        assert [t for piece in pieces for t in piece.tokens] == pieces[-1].completion.tokens
        return pieces[-1].completion

    async def main():
        return await asyncio.gather(*map(ask, range(len(PROMPTS))))

    assert all(map(same, asyncio.run(main()), right))


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(shared, right, micro_drafting):
    slow = shared.submit(PROMPTS[7], PARAMS[7])
    assert same(shared.generate(PROMPTS[1], PARAMS[1]), right[1])
    drained(micro_drafting.runner)
    (piece,) = slow
    assert same(piece.completion, right[7]) and piece.tokens == right[7].tokens and piece.text == right[7].text
