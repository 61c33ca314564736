"""Every example runs, and what it prints follows from the engine's own results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from ninfer_jax import Engine, SamplingParams

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shared_engines(monkeypatch, plain_engine, draft_engine, coarse_engine):
    """Spares the examples the compilations that the session has paid already."""

    def instead(path, config):
        if config.kv not in (None, "f32"):
            assert config.kv == coarse_engine.programs.shape.kv and not config.draft
            return coarse_engine
        return draft_engine if config.draft else plain_engine

    monkeypatch.setattr(Engine, "load", instead)


def row(output: str, name: str) -> list[str]:
    """The cells of a printed table's row."""
    line = next(line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


@pytest.mark.parametrize("name", ["generate", "chat", "speculative", "kv_formats"])
def test_help(name):
    app = typer.Typer()
    app.command()(example(name).main)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "bundled" in result.stdout and "--context" in result.stdout
    assert len((FOLDER / f"{name}.py").read_text("utf-8").splitlines()) < 100


def test_generate(shared_engines, plain_engine, capsys):
    example("generate").main(prompt="HAMLET.\n", max_new=20, temperature=0.5, seed=1)
    expected = plain_engine.generate("HAMLET.\n", plain_engine.default_params(max_new_tokens=20, temperature=0.5, seed=1))
    assert capsys.readouterr().out.startswith("HAMLET.\n" + expected.text + "\n")


def test_speculative(shared_engines, plain_engine, draft_engine, capsys):
    prompt = "def read(self, size=-1):\n"
    example("speculative").main(prompt=prompt, max_new=40)
    output = capsys.readouterr().out
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    plain, drafted = (engine.generate(prompt, params).stats for engine in (plain_engine, draft_engine))
    assert row(output, "tokens") == ["40", "40"]
    assert row(output, "rounds") == ["39", str(drafted.rounds)]
    assert row(output, "drafts accepted") == ["-", f"{drafted.accepted} of {drafted.drafted}"]
    assert drafted.rounds < plain.rounds
    assert "Same tokens." in output


def test_kv_formats(shared_engines, capsys):
    example("kv_formats").main(kv=["rk4v4"], max_new=30, context=512)
    output = capsys.readouterr().out
    # Two layers of two heads, a key and a value of 64 numbers each: 4 bytes a number; or half a byte and a byte for 32.
    assert row(output, "f32") == ["2048", "30 of 30", "0.00e+00"]
    size, agreeing, divergence = row(output, "rk4v4")
    assert size == str(8 * (64 // 2 + 64 // 32))
    assert re.fullmatch(r"\d+ of 30", agreeing)
    assert 0 < float(divergence) < 0.5


def test_chat(shared_engines, draft_engine, capsys, monkeypatch):
    asked = []
    stream = Engine.stream

    def spy(self, messages, params, **options):
        asked.append([message["content"] for message in messages])
        return stream(self, messages, params, **options)

    lines = iter(["Hello.", "", "Who are you?", "word " * 2000, "/new", "Good day.", "/quit", "never read"])
    monkeypatch.setattr(Engine, "stream", spy)
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    example("chat").main(system="Be brief.", max_new=12)
    first, second, long, fresh = asked
    assert first == ["Be brief.", "Hello."]
    assert second[:2] == first and len(second) == 4 and second[3] == "Who are you?"
    assert long[:4] == second and len(long) == 6
    assert fresh == ["Be brief.", "Good day."]
    assert next(lines) == "never read"
    output = capsys.readouterr().out
    assert "the context holds 512" in output and "/new starts afresh" in output
    assert draft_engine.runner.busy == 0


def test_chat_ends_with_its_input_and_survives_an_interrupt(shared_engines, draft_engine, monkeypatch):
    chat = example("chat")

    def interrupted():
        pieces = draft_engine.stream("x", SamplingParams(max_new_tokens=100, ignore_eos=True))
        yield next(pieces)
        try:
            raise KeyboardInterrupt
        finally:
            pieces.close()

    assert chat.show(interrupted())["role"] == "assistant"
    assert draft_engine.runner.busy == 0

    def end():
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    chat.main()
