"""Whose kernels a CPU's rounds run through: `EngineConfig.kernels`."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.config import ModelConfig
from ninfer_jax.programs.setup import resolve
from pallas_kernels.cpu import machine

pytestmark = [pytest.mark.engine, pytest.mark.bits]

PROMPT = [5, 900, 33, 17, 256, 80, 2] * 10
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7, top_p=0.95, frequency_penalty=0.2)
FEW = replace(GREEDY, temperature=1.1, seed=8, top_k=30)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FEW], ids=["greedy", "sampled", "sampled of few"])
def test_with_drafts_and_beside_others_the_answer_is_that_without(micro_engine, micro_drafting, params):
    alone = [micro_engine.generate(PROMPT[n:], params).tokens for n in range(3)]
    compiled = micro_drafting.compilations
    stats = micro_drafting.generate(PROMPT, GREEDY).stats
    assert 0 < stats.accepted < stats.drafted  # otherwise the comparison would mean little
    assert [answer.tokens for answer in micro_drafting.generate_many([PROMPT[n:] for n in range(3)], params)] == alone
    assert micro_drafting.compilations == compiled
    assert micro_drafting.programs.kernels == "cpu"


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_what_is_drawn_is_what_the_plain_forms_find_largest(engine_for, micro_path, micro_engine, kernels):
    """Teacher forcing through the prefill program, which has none of a round's kernels; logits are of the size of 1."""
    engine = micro_engine if kernels == "auto" else engine_for(micro_path, quickly=True, kernels="xla", **PLAIN_DRAFTING)
    tokens = engine.generate(PROMPT, GREEDY).tokens
    named = engine.tokenizer.vocab_size  # rows beyond are no tokens, and never drawn
    logits = micro_engine.score([*PROMPT, *tokens])[len(PROMPT) - 1 : -1, :named]
    drawn = logits[np.arange(len(tokens)), tokens]
    assert np.all(drawn > logits.max(axis=1) - 1e-3 * np.abs(logits).max())
    assert (engine.programs.kernels == "cpu") == (kernels == "auto")


PLAIN_DRAFTING = dict(context=256, prefill_chunk=64, kv="f32", draft=1)


def test_a_card_has_kernels_of_its_own(micro_path):
    model = ModelConfig.from_hf(micro_path)
    with pytest.raises(ValueError, match="kernels is 'cpu', which is for a CPU; on a card it is 'auto'"):
        resolve(model, 1024, EngineConfig(context=256, kernels="cpu"), "cuda")
    with pytest.raises(ValueError, match="kernels is 'llvm', known are auto, cpu, xla"):
        EngineConfig(kernels="llvm")


@pytest.fixture
def nothing_known(monkeypatch):
    """What was found out about this machine is forgotten, before and after."""
    known = (machine.here, machine.check)
    for function in known:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in known:
        function.cache_clear()


def refuse(*_: object) -> bytes:
    raise RuntimeError("no\nroom")


@pytest.mark.parametrize(
    "broken, said",
    [
        (lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX"), "this CPU is without avx2, .*fma"),
        (lambda patch: patch.setitem(sys.modules, "llvmlite.binding", None), "need llvmlite .*pip install llvmlite, or"),
        (lambda p: (p.setattr(machine.kept, "read", lambda _: None), p.setattr(machine, "_compile", refuse)), "no room"),
    ],
    ids=["an old CPU", "no LLVM", "an LLVM that fails"],
)
def test_without_kernels_one_line_says_why_and_names_xla(nothing_known, micro_path, broken, said):
    broken(nothing_known)
    with pytest.raises(ValueError, match=f"^kernels: .*{said}.*choose kernels='xla'$") as caught:
        Engine.load(micro_path, EngineConfig(context=256, prefill_chunk=64, draft=0))
    assert "\n" not in str(caught.value)


def test_a_kernel_that_llvm_refuses_is_told_on_one_line(monkeypatch, micro_path):
    programs = resolve(ModelConfig.from_hf(micro_path), 1024, EngineConfig(context=128, draft=0), "cpu").programs()
    monkeypatch.setattr("pallas_kernels.cpu.machine.digest", lambda source: "none")
    monkeypatch.setattr("pallas_kernels.cpu.machine._binding", lambda: SimpleNamespace(parse_assembly=refuse))
    with pytest.raises(ValueError, match="^kernels: LLVM .* refuses a CPU kernel .*no room.*choose kernels='xla'$"):
        programs.lowered("decode_round")
