"""What is left open is decided in one place: every command, and both engines, mean the same programs by it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from ninfer_jax import AsyncEngine, Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.cli.main import app
from ninfer_jax.engine import allocator
from ninfer_jax.programs.setup import Setup
from pallas_kernels import driver

WRITTEN = {
    "generate": ("--prompt", "x"),
    "bench": ("--prompt", "8", "--gen", "2", "--repeats", "1"),
    "eval": ("ppl", "--text", "TEXT"),
    "plan": ("--compiled",),
    "compile": ("--out", "OUT"),
}
TARGETS = {"cpu": ("cpu", 512, "f32", jnp.float32, 1), "cuda": ("gpu", 1024, "bf16", jnp.bfloat16, 4)}
FREE = 20_000_000_000


class Asked(BaseException):
    """Instead of programs; no command catches it."""

    def __init__(self, setup: Setup):
        self.setup = setup


@pytest.fixture(params=TARGETS)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if JAX ran on it, on a card of which a driver says that so much is free; nothing gets so far that it would have to."""

    def programs(self: Setup):
        raise Asked(self)

    monkeypatch.setattr(Setup, "programs", programs)
    monkeypatch.setattr(jax, "default_backend", lambda: TARGETS[request.param][0])
    monkeypatch.setattr("pallas_kernels.deviceless.start", lambda target: None)
    if request.param == "cuda":
        memory = FREE + allocator.OUTSIDE, 25_393_692_672
        for module in (allocator, driver):
            monkeypatch.setattr(module, "card_memory", lambda: memory)
        monkeypatch.setattr(driver, "card_name", lambda: "NVIDIA GeForce RTX 4090")
        monkeypatch.setattr(allocator, "gpu_wanted", lambda environment: True)
        monkeypatch.setattr(allocator, "settings", lambda need, free, total: {})
        monkeypatch.setattr("ninfer_jax.engine.memory.free_bytes", lambda device: FREE)
    return request.param


@pytest.fixture
def by_default(platform: str) -> Setup:
    with pytest.raises(Asked) as asked:
        Engine.load(tiny_path())
    return asked.value.setup


def invoke(command: str, platform: str, folder: Path, *more: str) -> Setup:
    """The setup that a command asks programs of."""
    (folder / "text").write_text("To be, or not to be, that is the question. " * 400)
    places = {"TEXT": str(folder / "text"), "OUT": str(folder / "out")}
    words = [places.get(word, word) for word in WRITTEN[command]]
    if command in ("plan", "compile") and platform == "cpu":
        words += ["--target", "cpu"]
    with pytest.raises(Asked) as asked:
        done = CliRunner().invoke(app, [command, "tiny", *words, *more])
        pytest.fail(done.output)
    return asked.value.setup


@pytest.mark.parametrize("command", WRITTEN)
def test_a_command_means_by_its_defaults_what_the_engine_does(
    command: str, by_default: Setup, platform: str, tmp_path: Path
) -> None:
    found = invoke(command, platform, tmp_path)
    if command in ("bench", "eval"):  # their contexts are what the measurement needs
        context = {"context": by_default.shape.context, "pages": by_default.shape.pages}
        if command == "eval":  # and what it measures is one sequence, without drafts
            context |= {"slots": by_default.shape.slots, "draft": by_default.shape.draft, "drafter": by_default.shape.drafter}
        found = Setup(**vars(found) | {"shape": found.shape._replace(**context)})
    assert found == by_default


def test_the_engine_for_many_means_the_same(by_default: Setup) -> None:
    with pytest.raises(Asked) as asked:
        AsyncEngine.open("tiny")
    assert asked.value.setup == by_default


def test_the_quick_plan_is_of_the_same(by_default: Setup, platform: str) -> None:
    done = CliRunner().invoke(app, ["plan", "tiny", "--json", *(("--target", "cpu") if platform == "cpu" else ())])
    found, shape = json.loads(done.stdout), by_default.shape
    names = ("context", "slots", "draft", "kv")
    assert {name: found["configuration"][name] for name in names} == {name: getattr(shape, name) for name in names}
    assert found["configuration"]["prefill_chunk"] == by_default.chunk and found["configuration"]["pool"] == shape.pool_tokens
    assert "first of the list" in found["why"] and "context" in found["chosen"] and "auto: context" in done.stderr


@pytest.mark.parametrize("command", ["generate", "plan", "compile"])
def test_what_is_set_is_what_is_loaded(command: str, platform: str, tmp_path: Path) -> None:
    given = "--context", "1000", "--kv", "int8", "--draft", "2", "--slots", "3", "--pool", "1500", "--prefill-chunk", "192"
    found = invoke(command, platform, tmp_path, *given)
    assert (found.shape.context, found.shape.kv, found.shape.draft, found.shape.slots) == (1000, "int8", 2, 3)
    assert found.shape.pool_tokens == 1536 and found.chunk == 192


def test_the_defaults_are_those_of_the_documentation(by_default: Setup, platform: str) -> None:
    _, chunk, kv, dtype, slots = TARGETS[platform]
    shape = by_default.shape
    assert (by_default.chunk, shape.kv, shape.dtype, shape.draft, shape.slots) == (chunk, kv, dtype, 3, slots)
    assert EngineConfig() == EngineConfig("auto", "auto", "auto", "auto", "auto", "auto", "auto") == EngineConfig(None, None, None)
