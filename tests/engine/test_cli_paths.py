"""Every path that a command takes, with everything that people give in its place: one line, exit code 1, nothing started."""

from __future__ import annotations

import os
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.cli.main import app
from ninfer_jax.engine.convert import convert
from ninfer_jax.programs import Programs


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    (tmp_path / "text").write_text("some text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("gone")
    with (tmp_path / "big").open("wb") as file:
        file.truncate(3 << 30)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(Programs, "compile_all", never)
    monkeypatch.setattr("ninfer_jax.engine.convert.open_source", never)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        yield


NOWHERE = ("link", "x" * 5000, "text/below", "pipe", "socket", "/dev/zero")
COMMANDS = {
    # what is given in the place of each path: for models, texts, directories to read, directories and files to write
    "generate {} --prompt x": ("", "gone", "~/m", "model.gguf", "model.zip", "text", "big", *NOWHERE),
    "generate tiny --messages {}": ("gone", "folder", "model.gguf", "model.zip", "big", "text", *NOWHERE),
    "generate tiny --prompt x --programs {}": ("gone", "text", "big", *NOWHERE),
    "plan {} --target cpu": ("", "gone", "~/m", "model.gguf", "model.zip", "text", "big", *NOWHERE),
    "compile {} --target cpu --out o": ("", "gone", "model.gguf", "model.zip", "text", "big", *NOWHERE),
    "compile tiny --target cpu --out {}": ("text", "big", *NOWHERE),
    "compile tiny --target cpu --out o --report {}": ("folder", "gone/x", *NOWHERE),
    "convert {} d": ("", "gone", "~/m", "model.zip", *NOWHERE),
    "convert tiny {}": ("", "text", "model.gguf", *NOWHERE),
    "convert tiny d --draft-head 9 --draft-text {}": ("gone", "folder", "model.gguf", "model.zip", "big", *NOWHERE),
    "convert tiny d --mtp {}": ("gone", "folder", *NOWHERE),
    "bench {}": ("", "gone", "model.gguf", "model.zip", "text", "big", *NOWHERE),
    "bench tiny --json {}": ("folder", "gone/x", *NOWHERE),
    "bench tiny --csv {}": ("folder", "gone/x", *NOWHERE),
    "bench tiny --plot {}": ("text", *NOWHERE),
    "eval {} ppl --text text": ("", "gone", "model.gguf", "model.zip", "text", "big", *NOWHERE),
    "eval tiny ppl --text {}": ("gone", "folder", "model.gguf", "model.zip", "big", *NOWHERE),
    "eval tiny ppl --text text --json {}": ("folder", "gone/x", *NOWHERE),
    "eval tiny ppl --text text --plot {}": ("text", *NOWHERE),
    "eval tiny kld --kv f32 --text text --against {}": ("gone", "model.gguf", "model.zip", "text", "big", *NOWHERE),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistaken_path(command: str) -> None:
    for given in COMMANDS[command]:
        done = CliRunner().invoke(app, [given if word == "{}" else word for word in command.split()])
        assert done.exit_code == 1 and not done.stdout, (given, done.output, done.exception)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (given, done.stderr)
        assert len(done.stderr) < 400 and (given[:20] in done.stderr or not given), (given, done.stderr)


def test_bench_names_texts_and_results_that_cannot_be_read() -> None:
    for option, files in {
        "--corpus": ("folder", "model.gguf", "big"),
        "--compare": ("folder", "model.gguf", "text", "pipe"),
    }.items():
        for given in files:
            done = CliRunner().invoke(app, ["bench", "tiny", option, given, "--prompt", "8", "--gen", "1"])
            assert done.exit_code == 1 and done.stderr.count("\n") == 1 and given in done.stderr, (option, given, done.output)


@pytest.mark.parametrize(
    "given", ["", "gone", "~/m", "model.gguf", "model.zip", "text", "a\0b", None, 3, b"tiny", *NOWHERE], ids=lambda g: repr(g)[:20]
)
def test_a_mistaken_path_in_python(given: object) -> None:
    calls = {"load": lambda: Engine.load(given), "destination": lambda: convert("tiny", given)}
    if given is not None:  # compile here
        calls["programs"] = lambda: Engine.load("tiny", EngineConfig(context=64, prefill_chunk=64, draft=0), programs=given)
    if given not in ("model.gguf", "text"):  # looked into by what reads sources
        calls["source"] = lambda: convert(given, "d")
    if given in ("gone", "~/m"):  # free places
        del calls["destination"]
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"\A.{1,399}\Z") as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1, name
