"""Sliding windows: each token once, with the history it should have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sample_text import TEXT

from ninfer_jax.evaluate.perplexity import text_loss, token_logprobs


def logprob(engine, history: list[int], token: int) -> float:
    logits = engine.score(history)[-1, : engine.tokenizer.vocab_size].astype(np.float64)
    return float(logits[token] - np.log(np.exp(logits).sum()))


def test_one_window(engine, ids):
    found = token_logprobs(engine, ids, 512, 512)
    for at in (1, 17, len(ids) - 1):
        assert found[at - 1] == pytest.approx(logprob(engine, ids[:at], ids[at]), abs=2e-3)


def test_later_windows_keep_some_history(engine, ids):
    window, stride = 40, 16
    found = token_logprobs(engine, ids, window, stride)
    assert len(found) == len(ids) - 1
    # The first window is new throughout, the others' first new token has window - stride tokens before its own window's end.
    for at, start in ((40, 0), (41, 16), (56, 16), (57, 32), (72, 32)):
        assert found[at - 1] == pytest.approx(logprob(engine, ids[start:at], ids[at]), abs=2e-3), at


def test_bytes_and_means(engine, ids):
    loss = text_loss(engine, ids, 512, 256)
    first = len(engine.tokenizer.token_bytes(ids[0]))
    assert loss.text_bytes == len(TEXT.encode()) - first and loss.tokens == len(ids) - 1
    assert loss.nats_per_byte * loss.text_bytes == pytest.approx(loss.nats) == pytest.approx(loss.nats_per_token * loss.tokens)
    assert loss.perplexity == pytest.approx(math.exp(loss.nats_per_token)) and loss.kv == "f32"
    assert 1.0 < loss.nats_per_token < math.log(engine.tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [(64, 65, "stride is 65"), (64, 0, "stride is 0"), (513, 64, "window is 513, the context holds 512")],
)
def test_windows_that_do_not_fit(engine, ids, window, stride, message):
    with pytest.raises(ValueError, match=message):
        text_loss(engine, ids, window, stride)


def test_a_single_token(engine):
    with pytest.raises(ValueError, match="the text has 1 tokens"):
        text_loss(engine, [5], 64, 64)
