"""Requests for an engine that many share, and what is said of their answers."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from ninfer_jax import Completion, SamplingParams
from ninfer_jax.engine.async_engine import Running

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


def ended(running: Running) -> Completion:
    """Its answer, or what it raises; AssertionError where it never comes to an end, which would hang a test."""
    said: list[Completion | BaseException] = []

    def read() -> None:
        try:
            said.append(running.result())
        except BaseException as error:
            said.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert said, "nobody has told the reader that its answer has ended"
    if isinstance(said[0], BaseException):
        raise said[0]
    return said[0]
