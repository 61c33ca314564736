"""What is left open is decided in one place: every command, and the engine, mean the same programs by it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.cli.main import app
from ninfer_jax.programs.setup import Setup

WRITTEN = {
    "generate": ("--prompt", "x"),
    "bench": ("--prompt", "8", "--gen", "2", "--repeats", "1"),
    "eval": ("ppl", "--text", "TEXT"),
}
TARGETS = {"cpu": ("cpu", 512, "f32", jnp.float32), "cuda": ("gpu", 1024, "bf16", jnp.bfloat16)}


class Asked(BaseException):
    """Instead of programs; no command catches it."""

    def __init__(self, setup: Setup):
        self.setup = setup


@pytest.fixture(params=TARGETS)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if JAX ran on it; nothing gets so far that it would have to."""

    def programs(self: Setup):
        raise Asked(self)

    monkeypatch.setattr(Setup, "programs", programs)
    monkeypatch.setattr(jax, "default_backend", lambda: TARGETS[request.param][0])
    monkeypatch.setattr("pallas_kernels.deviceless.start", lambda target: None)
    return request.param


@pytest.fixture
def by_default(platform: str) -> Setup:
    with pytest.raises(Asked) as asked:
        Engine.load(tiny_path())
    return asked.value.setup


@pytest.mark.parametrize("command", ["plan", "compile", *WRITTEN])
def test_a_command_means_by_its_defaults_what_the_engine_does(
    command: str, by_default: Setup, platform: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 400)
    compiling = "--target", "cpu" if platform == "cpu" else "rtx4090", *(("--out", str(tmp_path)) if command == "compile" else ())
    more = [str(tmp_path / "text") if word == "TEXT" else word for word in WRITTEN.get(command, compiling)]
    with pytest.raises(Asked) as asked:
        done = CliRunner().invoke(app, [command, "tiny", *more])
        pytest.fail(done.output)
    found = asked.value.setup
    if command in ("bench", "eval"):  # their contexts are what the measurement needs
        context = {"context": by_default.shape.context, "pages": by_default.shape.pages}
        found = Setup(**vars(found) | {"shape": found.shape._replace(**context)})
    assert found == by_default


def test_the_defaults_are_those_of_the_documentation(by_default: Setup, platform: str) -> None:
    _, chunk, kv, dtype = TARGETS[platform]
    shape = by_default.shape
    assert (by_default.chunk, shape.kv, shape.dtype, shape.draft, shape.slots) == (chunk, kv, dtype, 0, 1)
    assert EngineConfig() == EngineConfig(None, 1, 0, None, None, None, "auto")
