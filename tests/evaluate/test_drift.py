"""The float64 model is the engine's model, and errors are measured against it."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer_jax.evaluate.drift import state_drift
from ninfer_jax.evaluate.reference64 import Float64Model


@pytest.fixture(scope="module")
def exact(engine) -> Float64Model:
    return Float64Model(engine.programs.build(engine.runner.pool.parameters))


def test_the_float64_model_is_the_engines(engine, exact, ids):
    scored = engine.score(ids[:100])
    for start, end in ((0, 1), (1, 64), (64, 100)):  # in pieces, of one token too
        logits = exact.read(ids[start:end])
        np.testing.assert_allclose(logits, scored[end - 1], atol=1e-3)
    assert logits.dtype == np.float64 and np.abs(scored[99]).max() > 1
    assert [s.shape for s in exact.states] == [(3, 64, 64)] * 6


def test_errors_are_rounding_errors(engine, ids):
    told = []
    points = state_drift(engine, ids, 128, 64, "float64", lambda done, total: told.append((done, total)))
    assert [(p.path, p.position) for p in points] == [("prefill", 64), ("prefill", 128), ("decode", 64), ("decode", 128)]
    for p in points:
        assert p.reference == "float64" and len(p.state_error) == 6
        assert all(1e-9 < e < 1e-4 for e in p.state_error) and 1e-9 < p.logits_error < 1e-4 and 0 <= p.kl < 1e-7
    assert told[-1] == (384, 384)


def test_coarse_pages_show(coarse_engine, ids):
    """A 4-bit cache moves the states of the layers after an attention layer, not those before the first one."""
    (first, second) = state_drift(coarse_engine, ids, 128, 64, "float64")[:2]
    assert all(e < 1e-4 for e in first.state_error[:3] + second.state_error[:3])
    assert all(e > 1e-3 for e in second.state_error[3:]) and second.logits_error > 1e-3


def test_prefill_against_decode_steps(engine, ids):
    points = state_drift(engine, ids, 64, 64, "decode")
    assert [(p.path, p.reference, p.position) for p in points] == [("prefill", "decode", 64)]
    assert 0 < max(points[0].state_error) < 1e-4


@pytest.mark.parametrize(
    ("tokens", "every", "reference", "message"),
    [
        (128, 64, "exact", "reference is 'exact', known are float64, decode"),
        (128, 96, "decode", "every is 96"),
        (128, 256, "decode", "every is 256"),
        (448, 64, "decode", "448 are asked for"),
    ],
)
def test_refusals(engine, ids, tokens, every, reference, message):
    with pytest.raises(ValueError, match=message):
        state_drift(engine, ids, tokens, every, reference)
