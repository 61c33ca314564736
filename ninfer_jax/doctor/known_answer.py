"""The bundled model's answer to one prompt on each device, in a process of its own, against the tokens that it is known to give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ninfer_jax.doctor.finding import FINE, WRONG, Finding
from ninfer_jax.doctor.inputs import Inputs

PROMPT = "    def __repr__(self):\n        return 0"
# Greedy. The likeliest token is ahead of the second by 0.38 nats or more everywhere. bfloat16, in which a card computes, moves no
# logit by more than 0.07 (measured, transformers on a CPU): a device that says anything else computes something else.
EXPECTED = (297, 266, 443, 726, 264, 79, 81, 812, 379, 388, 292, 435, 356, 13, 965, 13)
SHAPES = {"context": 256, "prefill_chunk": 64, "draft": 3, "kv": "f32"}
LONGEST = 900  # seconds that a device may take, compiling included
KERNEL_MINUTES = 4

_ANSWER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ninfer_jax import Engine, EngineConfig, SamplingParams
engine = Engine.load("tiny", EngineConfig(**json.loads(sys.argv[2])))
answer = engine.generate(sys.argv[3], SamplingParams(temperature=0, max_new_tokens=int(sys.argv[4]), ignore_eos=True))
print(json.dumps(answer.tokens))
"""


def self_test(inputs: Inputs) -> Iterator[Finding]:
    """A finding for the CPU, and where there is a card with a plugin for it, one for that and, from a checkout, one for its
    kernels' numbers."""
    yield judge("cpu", *answer("cpu"))
    if inputs.cards and any(name.startswith("jax-cuda") for name in inputs.versions):
        yield judge("card", *answer("cuda"))
        if inputs.checkout:
            yield _kernels()


def answer(platform: str) -> tuple[list[int] | None, str]:
    """The tokens that a device answers with; None, and the last line of what was said instead, where it fails."""
    asked = [json.dumps(sys.path), json.dumps(SHAPES), PROMPT, str(len(EXPECTED))]
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ANSWER, *asked], env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {LONGEST} s"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return None, lines[-1] if lines else f"ended with status {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def judge(device: str, tokens: list[int] | None, why: str) -> Finding:
    """A finding on a device that gave those tokens, or None and a word about `why` instead."""
    name = f"self-test: {device}"
    facts = {"same_tokens": tokens == list(EXPECTED), "expected": list(EXPECTED), "answered": tokens}
    if tokens is None:
        return Finding(name, WRONG, f"the bundled model does not run: {why}", "report this: `ninfer-jax doctor --report`", facts)
    if tokens == list(EXPECTED):
        return Finding(name, FINE, f"the bundled model gives its {len(EXPECTED)} known tokens", "", facts)
    at = next((i for i, (a, b) in enumerate(zip(tokens, EXPECTED, strict=False)) if a != b), len(tokens))
    return Finding(
        name,
        WRONG,
        f"the bundled model gives other tokens than it should, from token {at} on: what this device computes is wrong",
        "do not use its answers; report this: `ninfer-jax doctor --report`",
        facts,
    )


def _kernels() -> Finding:
    """The kernels' numbers, by the first steps of benchmarks/device_check.py. Never run on a card so far."""
    script = Path(__file__).parents[2] / "benchmarks" / "device_check.py"
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str(script), "--minutes", str(KERNEL_MINUTES), "--out", place]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cuda"})
    if done.returncode == 0:
        return Finding("self-test: kernels", FINE, "the kernels' numbers hold on this card", "", {"status": 0})
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    text = f"benchmarks/device_check.py ends with status {done.returncode}: {lines[-1] if lines else 'no word about why'}"
    advice = "run it by itself, its results.md says which kernel"
    return Finding("self-test: kernels", WRONG, text, advice, {"status": done.returncode})
