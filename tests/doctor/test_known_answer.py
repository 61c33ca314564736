"""The tokens that the self-test expects, and what it says of a device that gives others or none."""

import sys

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.doctor import FINE, WRONG, Inputs, self_test
from ninfer_jax.doctor.known_answer import EXPECTED, PROMPT, answer, judge
from ninfer_jax.text import Tokenizer

LEAST_LEAD = 0.38  # nats, as the module says


def logits_by_transformers(dtype: torch.dtype) -> np.ndarray:
    """Logits before each expected token, `[tokens, vocab]`."""
    prompt = Tokenizer.from_dir(tiny_path()).encode(PROMPT)
    model = Qwen3_5ForCausalLM.from_pretrained(tiny_path(), dtype=dtype)
    with torch.no_grad():
        return model(torch.tensor([[*prompt, *EXPECTED]])).logits[0, len(prompt) - 1 : -1].float().numpy()


def test_transformers_says_the_expected_tokens_and_rounding_cannot_change_them():
    logits, rounded = map(logits_by_transformers, (torch.float32, torch.bfloat16))
    assert logits.argmax(-1).tolist() == rounded.argmax(-1).tolist() == list(EXPECTED)
    second, first = np.sort(logits, -1)[:, -2:].T
    assert (first - second).min() > LEAST_LEAD
    # Two logits meet when each moves by half of the lead; twice that is asked for.
    assert 4 * np.abs(rounded - logits).max() < LEAST_LEAD


def inputs(**fields) -> Inputs:
    nothing = dict(python="", system="", kernel="", cpuinfo="", meminfo="", cores=1, uid=0, environment={}, versions={})
    return Inputs(**nothing | fields)


@pytest.mark.parametrize("at", [0, 7, len(EXPECTED) - 1])
def test_one_other_token_is_wrong_and_says_where(at):
    tokens = list(EXPECTED)
    tokens[at] += 1
    found = judge("card", tokens, "")
    assert found.status == WRONG and f"from token {at} on" in found.text and found.facts["same_tokens"] is False
    assert judge("card", tokens[:at], "").status == WRONG
    assert judge("card", list(EXPECTED), "").status == FINE


def test_a_device_that_is_not_there_is_wrong_with_its_own_word(monkeypatch):
    tokens, why = answer("no_such_platform")
    assert tokens is None and "no_such_platform" in why
    found = judge("card", tokens, why)
    assert found.status == WRONG and why in found.text and found.advice


def test_a_process_without_a_word_is_wrong_too(monkeypatch, tmp_path):
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\nexit 3\n")
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    assert answer("cpu") == (None, "ended with status 3")


def test_a_card_is_tested_where_there_is_one_and_a_plugin_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr("ninfer_jax.doctor.known_answer.answer", lambda platform: asked.append(platform) or (list(EXPECTED), ""))
    assert [f.name for f in self_test(inputs())] == ["self-test: cpu"] and asked == ["cpu"]
    assert len(list(self_test(inputs(cards="0, a card\n")))) == 1  # no plugin: JAX cannot use it
    both = list(self_test(inputs(cards="0, a card\n", versions={"jax-cuda12-plugin": "0.10.2"})))
    assert [f.name for f in both] == ["self-test: cpu", "self-test: card"] and asked == ["cpu", "cpu", "cpu", "cuda"]
