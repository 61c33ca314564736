"""Requests for an engine that many share, and what is said of their answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ninfer_jax import Completion, SamplingParams

LENGTHS = (3, 70, 20, 130, 64, 200, 1, 90)
PROMPTS = [np.random.default_rng(seed).integers(0, 1000, length).tolist() for seed, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PARAMS = [
    replace(GREEDY, temperature=0.9 * (at % 2), seed=at, max_new_tokens=5 + 3 * at, logprobs=2 if at % 3 == 0 else None)
    for at in range(len(LENGTHS))
]
LONG = replace(GREEDY, max_new_tokens=180)


def same(ours: Completion, theirs: Completion) -> bool:
    return (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason)
