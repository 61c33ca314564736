"""Teacher-forced steps are decode steps: the same bits, beside other sequences, and nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer_jax import SamplingParams
from ninfer_jax.evaluate.forced import ForcedDecoder, log_softmax


@pytest.fixture(scope="module")
def decoder(engine) -> ForcedDecoder:
    return ForcedDecoder(engine)


@pytest.mark.bits
def test_steps_have_the_bits_of_decode_rounds(engine, decoder, ids):
    prompt = ids[:70]
    said = engine.generate(prompt, SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True, logprobs=20))
    with decoder.sequence(len(prompt) + 12) as sequence:
        rows = [sequence.prefill(prompt)] + [sequence.step(token) for token in said.tokens[:-1]]
    logits = np.stack(rows)[:, : engine.tokenizer.vocab_size]
    assert logits.argmax(1).tolist() == said.tokens
    # A round shows no logits, but differences of its log-probabilities are theirs: each is rounded to float32 once, which
    # from 16 to 32 moves it by 16 units at most. The first row is no step: `head` made its logits with those of a whole
    # chunk, `begin` those that were drawn from. Same hidden, other orders of summation: n additions err by about the square
    # root of n units of the sum, in both programs and for both logits of a difference.
    unit = 2.0**-24
    rounding = 2 * 16 * unit
    other_order = 2 * 2 * np.sqrt(engine.model_config.hidden_size) * unit * np.abs(logits).max()
    for at, (row, entry) in enumerate(zip(logits, said.logprobs, strict=True)):
        order, values = zip(*entry.top, strict=True)
        differences = np.array(values) - values[0]
        assert min(values) > -32
        tolerance = rounding if at else rounding + other_order
        np.testing.assert_allclose(row[list(order)] - row[order[0]].astype(np.float64), differences, rtol=0, atol=tolerance)


def test_steps_follow_the_prefill(engine, decoder, ids):
    scored = engine.score(ids)
    for depth in (0, 1, 65):
        with decoder.sequence(len(ids)) as sequence:
            if depth:
                np.testing.assert_allclose(sequence.prefill(ids[:depth]), scored[depth - 1], atol=2e-3)
            rows = [sequence.step(token) for token in ids[depth : depth + 20]]
        np.testing.assert_allclose(np.stack(rows), scored[depth : depth + 20], atol=2e-3)


def test_another_sequence_goes_on_undisturbed(engine, decoder, ids):
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    alone = engine.generate(ids[:30], params)
    stream = engine.stream(ids[:30], params)
    pieces = [next(stream), next(stream)]
    with decoder.sequence(40) as sequence:
        for token in ids[40:80]:
            sequence.step(token)
    pieces += list(stream)
    assert pieces[-1].completion.tokens == alone.tokens


def test_slot_and_pages_are_free_afterwards(engine, decoder):
    free = engine.runner.free_tokens
    with pytest.raises(RuntimeError, match="stop here"), decoder.sequence(100):
        assert engine.runner.free_tokens < free and engine.runner.busy == 1
        raise RuntimeError("stop here")
    assert engine.runner.free_tokens == free and engine.runner.busy == 0


def test_too_long(decoder):
    with pytest.raises(ValueError, match="context holds 512 tokens, 513 are asked for"), decoder.sequence(513):
        pass


def test_log_softmax_leaves_padding_rows_out():
    logits = np.random.default_rng(0).normal(0, 5, (600, 40)).astype(np.float32)
    logits[:, 30:] = 100.0
    p = np.exp(logits[:, :30].astype(np.float64))
    np.testing.assert_allclose(log_softmax(logits, 30), np.log(p / p.sum(1, keepdims=True)), atol=1e-6)
