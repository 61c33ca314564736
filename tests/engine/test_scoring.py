"""Log-probabilities: what decode rounds report must be what the prefill path computes for the same tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax import Engine, SamplingParams
from ninfer_jax.engine.runner import Runner
from ninfer_jax.model import TextModel
from ninfer_jax.programs import Programs

PROMPT = "SECOND LORD.\nI would not, by my will, "
TEXT = PROMPT * 20


def log_softmax(logits: np.ndarray, ids: int) -> np.ndarray:
    """Over the ids that have a token, in float64."""
    x = logits[:, :ids].astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.fixture(params=["plain", "drafting"])
def engine(request, plain_engine, draft_engine):
    return {"plain": plain_engine, "drafting": draft_engine}[request.param]


@pytest.mark.parametrize(
    "settings",
    [dict(temperature=0), dict(temperature=1.3, seed=9, top_k=20, logit_bias={40: 4.0}, repetition_penalty=1.2)],
    ids=["greedy", "sampled and biased"],
)
def test_logprobs_are_those_of_teacher_forcing(engine, settings):
    prompt = engine.tokenizer.encode(PROMPT)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, logprobs=5, **settings)
    completion = engine.generate(prompt, params)
    scored = engine.score([*prompt, *completion.tokens])
    expected = log_softmax(scored, engine.tokenizer.vocab_size)[len(prompt) - 1 : -1]

    assert [entry.token for entry in completion.logprobs] == completion.tokens
    for entry, row in zip(completion.logprobs, expected, strict=True):
        assert abs(entry.logprob - row[entry.token]) < 1e-3
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        np.testing.assert_allclose(values, np.sort(row)[:-6:-1], atol=1e-3)
        np.testing.assert_allclose(values, [row[token] for token, _ in entry.top], atol=1e-3)
    if settings["temperature"] == 0:
        assert all(entry.top[0][0] == entry.token for entry in completion.logprobs)


def test_logprobs_without_alternatives_and_after_a_stop_string(draft_engine):
    params = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True, logprobs=0)
    free = draft_engine.generate(PROMPT, params)
    assert all(entry.top == () for entry in free.logprobs)
    stop = draft_engine.tokenizer.decode(free.tokens)[8:11]
    stopped = draft_engine.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True, logprobs=0, stop=[stop]))
    assert stopped.finish_reason == "stop"
    assert stopped.logprobs == free.logprobs[: len(stopped.tokens)]


def in_chunks_of(chunk: int, engine: Engine) -> Engine:
    """The same model with another chunk; of its programs only those are compiled that scoring takes."""
    model = TextModel(engine.model_config, jnp.dtype("float32"), mtp=False)
    programs = Programs(model, engine.programs.shape, chunk, engine.tokenizer.vocab_size, "cpu")
    runner = Runner(programs, engine.runner.pool.parameters, programs.allocate())
    return Engine(runner, programs, engine.tokenizer, engine.template, engine.defaults, engine.model_config, (), 0)


def test_scores_do_not_depend_on_the_chunks(plain_engine):
    ids = plain_engine.tokenizer.encode(TEXT)[:300]
    scores = plain_engine.score(ids)
    assert scores.shape == (300, 1088) and scores.dtype == np.float32
    np.testing.assert_allclose(in_chunks_of(192, plain_engine).score(ids), scores, atol=1e-3)
    # Whole chunks, a chunk and one token, one token: earlier rows never see later ones.
    for length in (1, 63, 64, 65, 128):
        np.testing.assert_allclose(plain_engine.score(ids[:length]), scores[:length], atol=1e-3)


def test_scores_fill_the_context_and_no_more(plain_engine):
    ids = [token % 1000 for token in range(513)]
    assert len(plain_engine.score(ids[:512])) == 512
    with pytest.raises(ValueError, match="score: 513 tokens, the context holds 512"):
        plain_engine.score(ids)
    with pytest.raises(ValueError, match="prompt is empty"):
        plain_engine.score([])
