"""Fixed shapes: after an engine has loaded, no request compiles anything."""

from __future__ import annotations

import random

from ninfer_jax import SamplingParams
from ninfer_jax.programs import compilations


def varied(rng: random.Random) -> SamplingParams:
    """Settings that touch every branch of the sampler."""
    return SamplingParams(
        max_new_tokens=rng.choice((1, 2, 3, 7)),
        temperature=rng.choice((0, 0.5, 1.3)),
        top_k=rng.choice((0, 1, 20, 500)),
        top_p=rng.choice((1.0, 0.9, 0.0)),
        min_p=rng.choice((0.0, 0.1)),
        presence_penalty=rng.choice((0.0, 1.0)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        logit_bias=rng.choice(({}, {5: 3.0, 7: -100.0})),
        logprobs=rng.choice((None, 0, 5)),
        seed=rng.choice((None, 1)),
        stop=rng.choice(((), ("e",), ("\n\n", "the"))),
    )


def test_two_hundred_varied_requests_compile_nothing(draft_engine):
    engine = draft_engine
    engine.score([1, 2, 3])  # scoring's own program is compiled when first used
    before = compilations()
    rng = random.Random(0)
    for _ in range(50):
        prompts = [[rng.randrange(900) for _ in range(rng.choice((1, 2, 63, 64, 65, 130, 400)))] for _ in range(4)]
        engine.generate_many(prompts, [varied(rng) for _ in prompts])
    engine.score([rng.randrange(900) for _ in range(200)])
    assert compilations() == before
    assert engine.compilations == before - engine._started_at


def test_the_counter_counts():
    import jax

    before = compilations()
    jax.jit(lambda x: x * 3.5 + before)(1.0)
    assert compilations() > before
