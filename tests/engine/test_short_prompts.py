"""A prompt of few tokens goes through the program of few rows, and comes to the same."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer_jax import Engine, SamplingParams

# The bundled model with chunks of 256 rows: the only engine of the tests that has both programs.
SHAPE = dict(context=512, prefill_chunk=256, kv="f32", draft=3)
IDS = np.random.default_rng(5).integers(0, 1000, 500).tolist()


@pytest.fixture(scope="module")
def engine(engine_for) -> Engine:
    return engine_for(quickly=True, **SHAPE)


@pytest.mark.parametrize("length", [1, 128, 129, 300, 400])
def test_logits_and_answers_are_those_of_the_large_program(engine: Engine, plain_engine: Engine, length: int) -> None:
    """To rounding: programs of other shapes promise no bits. The other engine's prefill takes 64 rows a call."""
    ids = IDS[:length]
    ours, theirs = engine.score(ids), plain_engine.score(ids)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-4 * np.abs(theirs).max())
    greedy = SamplingParams(temperature=0.0, max_new_tokens=24)
    assert engine.generate(ids, greedy).tokens == plain_engine.generate(ids, greedy).tokens


def test_rows_of_each_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    called, prefill = [], engine.programs.prefill

    def spy(parameters, state, inputs):
        called.append((len(inputs.tokens), int(inputs.count)))
        return prefill(parameters, state, inputs)

    monkeypatch.setattr(engine.programs, "prefill", spy)
    compilations = engine.compilations
    for length in (100, 128, 129, 300, 500):
        engine.generate(IDS[:length], SamplingParams(temperature=0.0, max_new_tokens=1))
    assert called == [(128, 100), (128, 128), (256, 129), (256, 256), (128, 44), (256, 256), (256, 244)]
    assert engine.compilations == compilations
