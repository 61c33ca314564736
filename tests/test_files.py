"""Paths and files that a user names: one line that says what is wrong, before anything is read that need not be."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ninfer_jax import files, model_path
from ninfer_jax.checkpoints import Checkpoint, tiny_path
from ninfer_jax.files import FileError, decoded, directory, new_directory, new_file, parse_json, read_json, read_text, shown

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of everything that people give for a file or a directory. The big one has 3 GB, none of them on the disk."""
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "weights.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    (tmp_path / "blob").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    with tarfile.open(tmp_path / "model.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("config.json"), io.BytesIO())
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("config.json"), io.BytesIO())
    (tmp_path / "notes.txt").write_text("some text")
    with (tmp_path / "big").open("wb") as file:
        file.truncate(3 << 30)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # so that a socket's path is short enough
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        yield tmp_path


def refused(action: Callable[[], object], *parts: str) -> str:
    with pytest.raises(ValueError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < 600, message
    for part in parts:
        assert part in message, message
    return message


# What is no model directory, and the word that says so.
NO_MODEL = {
    "weights.safetensors": "is a safetensors file: name the directory that holds it",
    "model.gguf": "is a GGUF file: convert it first, with `ninfer-jax convert",
    "blob": "is a GGUF file: convert it first",
    "model.zip": "is a zip archive: unpack it",
    "model.tar": "is a tar archive: unpack it",
    "model.tar.gz": "is a gzip archive: unpack it",
    "notes.txt": "is a file: a model is a directory with config.json",
    "big": "is a file: a model is a directory with config.json",
    "pipe": "is a pipe, a directory is needed",
    "socket": "is a socket, a directory is needed",
    "/dev/zero": "is a device, a directory is needed",
    "link": "is a broken link to gone",
    "loop": "Too many levels of symbolic links",
    "nowhere": "No such file or directory; a model is a directory, or `tiny`",
    "notes.txt/model": "Not a directory",
    "~/model": "the ~ is only your shell's, write the home directory out",
    "x" * 5000: "(5000 characters): File name too long",
    "a\nb": "a\\nb: No such file",
    "": "model: the path is empty",
    "a\0b": "holds a NUL character",
}


@pytest.mark.parametrize(("name", "said"), NO_MODEL.items(), ids=lambda value: repr(value)[:30])
def test_what_is_no_model_directory(place: Path, name: str, said: str) -> None:
    refused(lambda: model_path.model_path(name), said)


@pytest.mark.parametrize("given", [None, 3, b"tiny", ["tiny"], {}], ids=repr)
def test_what_is_no_path(given: object) -> None:
    refused(lambda: model_path.model_path(given), "model is", "it must be a path")


def test_a_directory_of_something_else_than_a_model(place: Path) -> None:
    (place / "folder" / "q4.gguf").write_bytes(b"GGUF")
    refused(lambda: model_path.model_path("folder"), "folder holds a GGUF file", "ninfer-jax convert folder/q4.gguf DST")
    (place / "folder" / "q4.gguf").unlink()
    (place / "folder" / "adapter_config.json").write_text("{}")
    refused(lambda: model_path.model_path("folder"), "folder holds an adapter", "merge it into its base model")


def test_a_directory_that_may_not_be_listed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)  # permissions do not stop root
    refused(lambda: model_path.model_path("folder"), "folder: Permission denied")


def test_tiny_is_the_bundled_model_unless_something_of_that_name_is_there(place: Path) -> None:
    assert model_path.model_path("tiny") == model_path.model_path(Path("tiny")) == tiny_path()
    assert model_path.source_path("tiny") == tiny_path()
    (place / "tiny").mkdir()
    assert model_path.model_path("tiny") == model_path.source_path("tiny") == Path("tiny")


def test_what_is_no_source_of_a_conversion(place: Path) -> None:
    for name in ("weights.safetensors", "model.gguf", "blob", "folder"):  # looked into by whoever reads them
        assert model_path.source_path(name) == Path(name)
    for name in ("model.zip", "model.tar", "model.tar.gz"):
        refused(lambda name=name: model_path.source_path(name), name, "archive: unpack it")
    for name in ("pipe", "socket", "/dev/zero"):
        refused(
            lambda name=name: model_path.source_path(name), f"{name} is a", "a checkpoint directory or a file of weights is needed"
        )
    for name in ("", "nowhere", "link", "~/m", "x" * 5000, "a\0b"):
        refused(lambda name=name: model_path.source_path(name))


@pytest.mark.parametrize(
    "name", ["model.gguf", "model.zip", "big", "pipe", "socket", "/dev/zero", "link", "nowhere", "x" * 5000, ""]
)
def test_what_is_no_checkpoint(place: Path, name: str) -> None:
    refused(lambda: Checkpoint.open(name))


TEXT_MISTAKES = {
    "folder": "is a directory, a file is needed",
    "pipe": "is a pipe, a file is needed",
    "socket": "is a socket, a file is needed",
    "/dev/zero": "is a device, a file is needed",
    "link": "is a broken link",
    "nowhere": "No such file or directory",
    "weights.safetensors": "a safetensors file, not a text",
    "model.gguf": "a GGUF file, not a text",
    "model.zip": "a zip archive, not a text",
    "model.tar.gz": "a gzip archive, not a text",
    "model.tar": "a tar archive, not a text",
    "big": "is 3,221,225,472 bytes long, at most",
    "x" * 5000: "File name too long",
    "": "the path is empty",
    "a\0b": "NUL",
}


@pytest.mark.parametrize(("name", "said"), TEXT_MISTAKES.items(), ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("read", [read_text, read_json])
def test_what_is_no_text(place: Path, read: Callable[..., object], name: str, said: str) -> None:
    refused(lambda: read(name, label="--text "), said)


def test_no_mistake_is_read_whole(place: Path) -> None:
    """3 GB given for a text or a model: the address space that reading it whole would take is not there."""
    names = ["big", "weights.safetensors", "/dev/zero", "pipe"]
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from ninfer_jax.files import read_json, read_text
from ninfer_jax.model_path import model_path
from ninfer_jax.config import ModelConfig
for name in {names!r}:
    for use in (read_text, read_json, model_path, ModelConfig.from_hf):
        try:
            use(name)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
        else:
            raise SystemExit(f"{{use}} took {{name}}")
"""

    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_text_that_only_says_so(tmp_path: Path) -> None:
    for text in ("GGUF is a format", "PK\x03\x04", '12345678{"a": 1}', "\ufeffé"):
        (tmp_path / "t").write_text(text, "utf-8")
        assert read_text(tmp_path / "t") == text.removeprefix("\ufeff")


def test_pipes_that_a_shell_has_opened(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[1, 2]")
    os.close(writer)
    try:
        assert read_json(f"/dev/fd/{reader}") == [1, 2]
    finally:
        os.close(reader)


def test_utf8_is_checked_to_the_byte() -> None:
    text = "aé€🦙" * 3
    raw = text.encode()
    for size in (1, 2, 3, 5, 100):
        chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert decoded(chunks, "t") == decoded([b"\xef\xbb\xbf", *chunks], "t") == text
        for cut in range(1, len(raw)):
            broken = raw[:cut] + b"\xff" + raw[cut:]
            whole = len(raw[:cut].decode(errors="ignore").encode())
            message = refused(lambda b=broken, s=size: decoded([b[at : at + s] for at in range(0, len(b), s)], "t"))
            assert message == f"t: not UTF-8 (byte {whole})", (size, cut)
    refused(lambda: decoded([raw[:-1]], "t"), f"not UTF-8 (byte {len(raw) - 4})")
    refused(lambda: decoded(["é".encode("utf-16")], "t"), "not UTF-8 but UTF-16: save it as UTF-8")
    refused(lambda: decoded(iter([b"a" * 10] * 3), "t", limit=25), "t is longer than the 25 bytes that are read")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "f is not JSON (line 1: "),
        ('{"a": 1,\n"a": 2}', "f lists a twice"),
        ("[" * 100_000, "f is not JSON that can be read (nested too deeply)"),
        ("1" * 5000, "f holds a number of 5000 digits, at most 4300 are read"),
        (b"\xff", "f is not JSON: not UTF-8 (byte 0)"),
        ("[1]".encode("utf-16"), "f is not JSON: not UTF-8 but UTF-16"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_json(text: str | bytes, said: str) -> None:
    refused(lambda: parse_json(text, "f"), said)


def test_json_with_and_without_a_byte_order_mark() -> None:
    assert parse_json("\ufeff[1]", "f") == parse_json(b"\xef\xbb\xbf[1]", "f") == parse_json("[1]", "f") == [1]
    assert parse_json("-" + "1" * 4299, "f") == -int("1" * 4299)


def test_places_to_write(place: Path) -> None:
    for make, kind in ((new_file, "file"), (new_directory, "directory")):
        for name in ("pipe", "socket", "/dev/null", "link", "loop", "x" * 5000, "", "a\0b", "notes.txt/x"):
            refused(lambda name=name, make=make: make(name, label="--out "))
        other = "folder" if kind == "file" else "notes.txt"
        refused(lambda make=make, other=other: make(other), f"a {kind} is needed")
    refused(lambda: new_file("nowhere/x"), "there is no directory", "nowhere")
    assert new_directory("nowhere/x/y") == Path("nowhere/x/y") and not (place / "nowhere").exists()
    assert (
        new_file("new") == Path("new") and new_file("notes.txt") == Path("notes.txt") and new_directory("folder") == Path("folder")
    )
    refused(lambda: directory("notes.txt", label="--programs "), "--programs notes.txt is a file, a directory is needed")


def test_places_that_may_not_be_written_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(lambda: new_file("x"), "Permission denied")
    refused(lambda: new_directory("x"), "Permission denied")


def test_what_messages_quote() -> None:
    assert shown("x" * 1000).startswith("'xxx") and len(shown("x" * 1000)) < 100
    assert shown(10**5000) == "a number of more than 4300 digits"
    assert shown(np.float32) == "the type float32"
    assert shown(Path("a b")) == "a b" and shown("a") == "'a'" and shown(1.5) == "1.5"
    assert str(FileError("a\nb\x1b")) == "a\\nb\\x1b"
    assert files.printable("é 🦙") == "é 🦙"
