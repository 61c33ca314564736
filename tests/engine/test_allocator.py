"""What JAX is told to take of a card, and when; cards are stood in for, no GPU is here."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import jax
import pytest

from ninfer_jax.config import EngineConfig, preset, recipe
from ninfer_jax.engine import allocator, memory
from ninfer_jax.engine.allocator import FRACTION, OUTSIDE, PREALLOCATE, reserve, settings, share
from ninfer_jax.programs.plan import WORKSPACE_ALLOWANCE
from ninfer_jax.programs.setup import resolve
from pallas_kernels.driver import card_memory, cuda_version

CARD = 25_393_692_672  # bytes that an RTX 4090 reports
SUCCESS, NOT_FOUND = 0, 100


def setup_27b(**shapes: object):
    engine = EngineConfig(**{"context": 262_144, "kv": "rk4v4-e8", "draft": 3, "prefill_chunk": 1024} | shapes)
    return resolve(preset("qwen3_8_27b"), 248_077, engine, "cuda", recipe("q4"))


def test_the_27bs_share_by_hand():
    """Weights to 0.2 %: 4 bits and a byte of scale per 64 for the body, 8 and a byte per 128 for head and MTP layer, 4 bits and
    two bytes of scale per 64 for the embedding.
    States with the rings of rows that wait, two rounds of four rows. Staging, for a snapshot: a slot's matrices, its window of
    three inputs a layer and the last hidden row."""
    vocabulary = 248_320 * 5120
    mlp, attention = 3 * 5120 * 17_408, 5120 * 14_336 + 6144 * 5120
    body = 64 * mlp + 16 * attention + 48 * (5120 * 16_384 + 6144 * 5120)
    fine = vocabulary + mlp + attention + 2 * 5120 * 5120 + 48 * 96 * 5120
    pages = 17 * 4 * 272 * (262_144 + 64)
    states = 48 * (48 * 128 * 128 * 4 + 8 * (10_240 * 2 + (16 * 128 + 48 * 128 + 48 + 48) * 4))
    staging = 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2) + 5120 * 2
    weights = body * (0.5 + 1 / 64) + fine * (1 + 1 / 128) + vocabulary * (0.5 + 2 / 64)
    by_hand = weights + pages + states + staging + 4 * 1024 * 248_320 + WORKSPACE_ALLOWANCE
    assert share(setup_27b()) == pytest.approx(by_hand, rel=2e-3)
    assert share(setup_27b(slots=2)) - share(setup_27b()) == pytest.approx(pages + states, rel=1e-3)


@pytest.mark.parametrize("need", [1, 12_345_678_901, 21_113_163_504, 24_000_000_001])
def test_a_need_that_is_there_is_taken_to_the_millionth(need):
    found = settings(need, CARD - (400 << 20), CARD)
    taken = math.floor(Fraction(found[FRACTION]) * CARD)  # as JAX does
    assert need <= taken <= need + 2e-6 * CARD and found[PREALLOCATE] == "true"


@pytest.mark.parametrize("need", [None, CARD, 23_000_000_000])
def test_no_more_is_taken_than_is_free(need):
    free = 20_000_000_000
    taken = math.floor(Fraction(settings(need, free, CARD)[FRACTION]) * CARD)
    assert free - OUTSIDE - 2e-6 * CARD <= taken <= free - OUTSIDE


class Driver:
    """libcuda's part of it: what was called, in order; `fails` is the name of a call that does not succeed."""

    def __init__(self, fails: str = ""):
        self.called, self.fails = [], fails

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.called.append(name)
            if name == self.fails:
                return NOT_FOUND
            if name == "cuMemGetInfo_v2":
                for reference, value in zip(arguments, (23_000_000_000, CARD), strict=True):
                    reference._obj.value = value
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = 12_080
            return SUCCESS

        return call


def test_the_driver_is_asked_and_left_as_it_was(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert card_memory() == (23_000_000_000, CARD)
    assert driver.called[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    assert cuda_version() == (12, 8)


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"])
def test_a_driver_that_does_not_answer_is_no_card(monkeypatch, fails):
    driver = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert card_memory() is None
    assert (cuda_version() is None) == (fails == "cuInit")
    pairs = ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"), ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    for begun, ended in pairs:
        assert (ended in driver.called) == (begun in driver.called and begun != fails)


def test_no_driver_is_no_card(monkeypatch):
    def missing(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert card_memory() is None and cuda_version() is None


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_PLATFORMS": "cpu"},
        {FRACTION: "0.5"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"},
        {PREALLOCATE: "false"},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    ],
)
def test_who_has_chosen_is_left_alone(monkeypatch, environment):
    monkeypatch.setattr(allocator, "card_memory", lambda: (23_000_000_000, CARD))
    if "JAX_PLATFORMS" not in environment:
        monkeypatch.setattr(allocator, "gpu_wanted", lambda environment: True)
    before = dict(environment)
    reserve(None, environment)
    assert environment == before


CHILD = """
import json, os, sys
import jax
from jax._src import xla_bridge
from ninfer_jax import Engine, EngineConfig
from ninfer_jax.engine import allocator
from ninfer_jax.checkpoints import tiny_path

def starts():
    names = allocator.FRACTION, allocator.PREALLOCATE
    print(json.dumps({"started": xla_bridge.backends_are_initialized(), **{n: os.environ.get(n) for n in names}}))
    sys.exit()

allocator.card_memory = lambda: (900_000_000, 1_000_000_000)
jax.default_backend = starts
COMMAND
"""


@pytest.mark.parametrize("command", ["load", "bench"])
def test_the_environment_is_there_before_jax_starts(command):
    """In a process of its own, up to the line that would start the device."""
    load = "Engine.load(tiny_path(), EngineConfig(context=4096, prefill_chunk=64, draft=1, slots=2))"
    bench = "sys.argv = ['ninfer-jax', 'bench', 'tiny']; from ninfer_jax.cli.main import app; app()"
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", *allocator.CHOSEN)}
    code = CHILD.replace("COMMAND", {"load": load, "bench": bench}[command])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["started"] is False and found[PREALLOCATE] == "true"
    fraction = float(found[FRACTION])
    if command == "bench":
        assert fraction == pytest.approx((900_000_000 - OUTSIDE) / 1e9, abs=2e-6)
    else:
        # 7.1 million weights in two bytes, KV pages in bf16, 64 x 1,088 logits, the workspace; states are small.
        assert WORKSPACE_ALLOWANCE + 14e6 < fraction * 1e9 < WORKSPACE_ALLOWANCE + 14e6 + 60e6


def test_a_limit_that_is_smaller_than_the_plan_is_said(monkeypatch):
    """JAX started before, with three quarters of the card: not the card is too small."""
    stats = {"bytes_limit": 19_045_269_504, "bytes_in_use": 0}
    device = SimpleNamespace(platform="gpu", device_kind="a card", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(memory, "resident_bytes", lambda programs: 20_500_000_000)
    monkeypatch.setattr(allocator, "card_memory", lambda: (CARD - 19_500_000_000, CARD))
    with pytest.raises(ValueError, match=f"19,045,269,504 are free.*JAX was started with a limit.*{FRACTION}=0.82") as caught:
        memory.check_memory(None, memory.free_bytes(device), 100_000_000)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="take a smaller context"):
        memory.check_memory(None, memory.free_bytes(device), 5_500_000_000)
