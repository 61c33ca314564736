"""After start nothing grows: a thousand mixed requests, buffers counted while they run and after each batch."""

from __future__ import annotations

import dataclasses
import gc
import random

import jax
import pytest

from ninfer_jax import Engine, SamplingParams
from ninfer_jax.engine.runner import Runner
from ninfer_jax.programs import compilations

REQUESTS, WARM = 1000, 100


def live() -> tuple[int, int]:
    """Buffers of this process that are not freed yet, and their bytes."""
    arrays = jax.live_arrays()
    return len(arrays), sum(a.nbytes for a in arrays)


def settings(rng: random.Random, at: int) -> SamplingParams:
    """Every branch of the sampler; the seed makes a second run the same."""
    return SamplingParams(
        max_new_tokens=rng.randint(1, 4),
        temperature=rng.choice((0, 0.5, 1.3)),
        top_k=rng.choice((0, 1, 20, 500)),
        top_p=rng.choice((1.0, 0.9, 0.0)),
        min_p=rng.choice((0.0, 0.1)),
        presence_penalty=rng.choice((0.0, 1.0)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        logit_bias=rng.choice(({}, {5: 3.0, 7: -100.0})),
        logprobs=rng.choice((None, 0, 5)),
        seed=at,
        stop=rng.choice(((), ("e",), ("\n\n", "the"))),
        ignore_eos=rng.random() < 0.5,
    )


def serve(engine: Engine, rng: random.Random, first: int, count: int) -> None:
    """`count` requests: batches of one to five over two slots, streams that are left early, and scores."""
    at = first
    while at < first + count:
        batch = min(rng.randint(1, 5), first + count - at)
        prompts = [[rng.randrange(900) for _ in range(rng.choice((1, 2, 20, 63, 64, 65, 130, 200)))] for _ in range(batch)]
        wanted = [settings(rng, at + i) for i in range(batch)]
        if batch == 1 and rng.random() < 0.5:
            pieces = engine.stream(prompts[0], dataclasses.replace(wanted[0], max_new_tokens=9, ignore_eos=True, stop=()))
            next(pieces)
            pieces.close()
        elif batch == 1 and rng.random() < 0.3:
            engine.score(prompts[0])
        else:
            engine.generate_many(prompts, wanted)
        at += batch


@pytest.mark.long
def test_a_thousand_mixed_requests_leave_the_peak_where_it_was(micro_drafting, monkeypatch):
    peak = [0, 0]
    advance = Runner.advance

    def counted(self: Runner, *arguments: object) -> None:
        advance(self, *arguments)
        peak[:] = map(max, peak, live())

    monkeypatch.setattr(Runner, "advance", counted)
    engine = micro_drafting
    gc.collect()  # what earlier tests left is not counted
    rng = random.Random(0)
    engine.score([1, 2, 3])  # scoring's own program is compiled when first used
    serve(engine, rng, 0, WARM)
    before, at_most, compiled = live(), list(peak), compilations()
    serve(engine, rng, WARM, REQUESTS - WARM)
    assert live() == before
    assert peak == at_most
    assert compilations() == compiled
    assert engine.runner.busy == 0 and engine.runner.free_tokens == engine.runner.pool_tokens
