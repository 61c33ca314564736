"""The engine for many callers: answers are those of one caller, whoever else is there, whatever fails, however they are read."""

from __future__ import annotations

import asyncio
import gc
import random
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from shared import LONG, PARAMS, PROMPTS, same

from ninfer_jax import AsyncEngine, SamplingParams
from ninfer_jax.programs import compilations

pytestmark = pytest.mark.micro


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


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(shared, right, drained):
    slow = shared.submit(PROMPTS[7], PARAMS[7])
    assert same(shared.generate(PROMPTS[1], PARAMS[1]), right[1])
    drained()
    (piece,) = slow
    assert same(piece.completion, right[7]) and piece.tokens == right[7].tokens and piece.text == right[7].text


def test_messages_text_and_settings_are_those_of_the_engine(shared, micro_engine):
    """Template and tokenizer run where `submit` is called, with the checkpoint's defaults where nothing is said."""
    settings = shared.default_params(max_new_tokens=4, temperature=0)
    messages = [{"role": "user", "content": "Hello"}]
    ours = shared.generate(messages, settings, enable_thinking=False)
    theirs = micro_engine.generate(messages, settings, enable_thinking=False)
    assert same(ours, theirs) and ours.prompt_tokens == theirs.prompt_tokens
    assert shared.generate("Hello", settings).prompt_tokens == len(shared.text.tokenizer.encode("Hello"))
    assert (shared.context, shared.describe()["slots"], shared.describe()["draft"]) == (256, 2, 1)


def test_what_cannot_be_computed_is_refused_where_it_is_asked(shared, right, micro_engine):
    running = shared.submit(PROMPTS[0], PARAMS[0])
    refused = (
        ([], {}, "prompt is empty"),
        ([1] * 256, {}, "the context holds 256"),
        ([99999], {}, "token id 99999"),
        ([1], {"deadline": 0}, "^deadline: 0 s from now is in the past$"),
        ([1], {"deadline": -2.5}, "^deadline: -2.5 s from now is in the past$"),
        ([1], {"deadline": float("nan")}, "in the past"),
        ([1], {"enable_thinking": True}, "only messages go through"),
    )
    for prompt, options, said in refused:
        with pytest.raises(ValueError, match=said) as caught:
            shared.submit(prompt, LONG, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="queue is -1"):
        AsyncEngine(micro_engine, queue=-1)
    assert same(running.result(), right[0])


def test_scoring_between_rounds(shared, right, micro_engine):
    running = shared.submit(PROMPTS[5], PARAMS[5])
    scores = shared.call(lambda engine: engine.score(PROMPTS[1])).result()
    np.testing.assert_allclose(scores, micro_engine.score(PROMPTS[1]), rtol=0, atol=1e-4)
    with pytest.raises(ZeroDivisionError):
        shared.call(lambda engine: 1 // 0).result()
    assert same(running.result(), right[5])


def test_the_engine_below_is_taken(shared, micro_drafting):
    """By another thread it would be two at a time."""
    shared.generate([1], LONG, deadline=60)
    for use in (
        lambda: micro_drafting.generate([1, 2], LONG),
        lambda: micro_drafting.score([1]),
        lambda: micro_drafting.runner.lease(9),
    ):
        with pytest.raises(RuntimeError, match="belongs to an AsyncEngine"):
            use()


@pytest.mark.parametrize("requests", [300, pytest.param(5000, marks=pytest.mark.full)])
def test_nothing_grows_and_nothing_is_compiled(shared, micro_engine, micro_drafting, drained, requests: int):
    """Mixed requests from threads and an event loop, some left early, some with a deadline: a tenth is compared with its answer
    alone; buffers, pages, slots and compilations are where they were."""
    rng = random.Random(requests)

    def wanted() -> tuple[list[int], SamplingParams]:
        prompt = [rng.randrange(900) for _ in range(rng.choice((1, 2, 20, 63, 64, 65, 130, 200)))]
        return prompt, SamplingParams(
            max_new_tokens=rng.randint(1, 6),
            temperature=rng.choice((0, 0.5, 1.3)),
            top_k=rng.choice((0, 1, 20)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, 3)),
            seed=rng.randrange(1 << 40),
            stop=rng.choice(((), ("e",))),
            ignore_eos=rng.random() < 0.5,
        )

    def ask(job: tuple[int, list[int], SamplingParams]):
        at, prompt, params = job
        running = shared.submit(prompt, params, deadline=3600 if at % 4 else None)
        if at % 7 == 0:
            next(iter(running))
            running.cancel()
            return None
        return asyncio.run(running.wait()) if at % 5 == 0 else running.result()

    def serve(count: int) -> None:
        jobs = [(at, *wanted()) for at in range(count)]
        with ThreadPoolExecutor(8) as threads:
            done = list(threads.map(ask, jobs))
        drained()
        for (at, prompt, params), completion in zip(jobs, done, strict=True):
            if completion is not None and at % 10 == 1:
                assert same(completion, micro_engine.generate(prompt, params))

    def live() -> tuple[int, int]:
        gc.collect()
        arrays = jax.live_arrays()
        return len(arrays), sum(a.nbytes for a in arrays)

    serve(40)
    before, compiled, answers = live(), compilations(), shared.load().numbers["engine_answers"]
    serve(requests)
    assert live() == before
    assert compilations() == compiled
    load = shared.load()
    assert load.numbers["engine_answers"] - answers == requests and load.numbers["engine_faults"] == 0
    assert (load.waiting, load.pages_used, load.slots) == (0, 0, [{"state": "free", "tokens": 0}] * 2)
    assert load.numbers["engine_drafted"] > load.numbers["engine_accepted"] > 0
