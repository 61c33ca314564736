"""`plan` and `compile` where files cannot be written: one line that names the file, and nothing that looks whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ninfer_jax.cli.main import app
from ninfer_jax.programs import Programs
from ninfer_jax.programs.executables import MANIFEST

SHAPES = ("--target", "cpu", "--context", "64", "--prefill-chunk", "64", "--draft", "0")


@pytest.fixture
def line():
    """Runs a command that must end with exit 1 and one line; returns the line."""

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments), *SHAPES])
        assert done.exit_code == 1 and done.stdout == "", done.output
        (said,) = (told for told in done.stderr.strip().splitlines() if told and not told.startswith("auto: "))
        assert said.startswith("error: ")
        return said

    return run


@pytest.fixture
def full(monkeypatch):
    """A disk with room for nothing: like the system's own, its error names no file."""
    write = Path.write_bytes

    def write_bytes(self: Path, data: bytes) -> int:
        write(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    def compiled(self: Programs, name: str):
        raise AssertionError(f"{name} was compiled")

    monkeypatch.setattr(Programs, "compiled", compiled)


def test_a_full_disk(tmp_path, full, line, monkeypatch):
    said = line("compile", "tiny", "--out", tmp_path / "out")
    assert "out/cpu/allocate.bin: No space left on device" in said
    assert not (tmp_path / "out/cpu" / MANIFEST).exists()
    assert "No space left on device" in line("plan", "tiny", "--compiled")
    monkeypatch.undo()
    # What is left counts as the beginning of programs, not as something else.
    monkeypatch.setattr(Programs, "compiled", lambda self, name: (_ for _ in ()).throw(RuntimeError("compiled")))
    assert "compiled" in line("compile", "tiny", "--out", tmp_path / "out")


def test_no_permission(tmp_path, line, monkeypatch, nothing_is_compiled):
    """The superuser may write anywhere, so the system's answer is given for it."""
    place = tmp_path / "out"

    def mkdir(path: object, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert f"{place}: Permission denied" in line("compile", "tiny", "--out", place)
    assert "Permission denied" in line("plan", "tiny", "--compiled")


def test_places_that_are_none(tmp_path, line, nothing_is_compiled):
    (tmp_path / "file").write_text("years")
    assert "file is a file, a directory is needed" in line("compile", "tiny", "--out", tmp_path / "file")
    assert f"{tmp_path / 'file'}" in line("compile", "tiny", "--out", tmp_path / "file/below")
    said = line("compile", "tiny", "--out", tmp_path, "--report", tmp_path / "none/r.json")
    assert f"there is no directory {tmp_path / 'none'}" in said
    assert (tmp_path / "file").read_text() == "years"
