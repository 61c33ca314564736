"""An engine whose rounds run on the CPU's own kernels: `EngineConfig(kernels="cpu")`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ninfer_jax import EngineConfig, SamplingParams
from ninfer_jax.config import ModelConfig
from ninfer_jax.programs.setup import resolve

pytestmark = [pytest.mark.engine, pytest.mark.bits]

PROMPT = [5, 900, 33, 17, 256, 80, 2] * 10
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7, top_p=0.95, frequency_penalty=0.2)


@pytest.fixture(scope="module")
def plain(engine_for, micro_path):
    return engine_for(micro_path, context=256, prefill_chunk=64, kv="f32", kernels="cpu")


@pytest.fixture(scope="module")
def drafting(engine_for, micro_path):
    return engine_for(micro_path, context=256, prefill_chunk=64, kv="f32", slots=2, draft=1, kernels="cpu")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_drafts_and_beside_others_the_answer_is_that_without(plain, drafting, params):
    alone = [plain.generate(PROMPT[n:], params).tokens for n in range(3)]
    stats = drafting.generate(PROMPT, GREEDY).stats
    assert 0 < stats.accepted < stats.drafted  # otherwise the comparison would mean little
    assert [answer.tokens for answer in drafting.generate_many([PROMPT[n:] for n in range(3)], params)] == alone
    assert drafting.compilations == 6


def test_what_is_drawn_is_what_the_plain_forms_find_largest(plain, micro_engine):
    """Teacher forcing through the prefill program, which has none of these kernels; logits are of the size of 1."""
    tokens = plain.generate(PROMPT, GREEDY).tokens
    named = micro_engine.tokenizer.vocab_size  # rows beyond are no tokens, and never drawn
    logits = micro_engine.score([*PROMPT, *tokens])[len(PROMPT) - 1 : -1, :named]
    drawn = logits[np.arange(len(tokens)), tokens]
    assert np.all(drawn > logits.max(axis=1) - 1e-3 * np.abs(logits).max())


def test_a_card_has_kernels_of_its_own(micro_path):
    model = ModelConfig.from_hf(micro_path)
    with pytest.raises(ValueError, match="kernels is 'cpu', which is for a CPU; on a card it is 'auto'"):
        resolve(model, 1024, EngineConfig(context=256, kernels="cpu"), "cuda")
    with pytest.raises(ValueError, match="kernels is 'llvm', known are auto, cpu, xla"):
        EngineConfig(kernels="llvm")
