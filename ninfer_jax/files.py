"""Files that a user names: what a path has to be before anything is read from it, and bounded reads of text and JSON.

The lowest module of the package: every other may use it, and it starts neither JAX nor a library.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

# Far above what such files have: a tokenizer.json of 248,077 ids has 20 MB, a config.json a few KB.
MAX_JSON_BYTES = 256 << 20
MAX_TEXT_BYTES = 256 << 20
MAX_DIGITS = 4300  # of a whole number: more than these CPython refuses to print and to parse

_CHUNK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# What people have in the place of a text or of a directory, by how such files begin: (offset, bytes, in words).
_MAGIC = (
    (0, b"GGUF", "a GGUF file"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"PK\x05\x06", "a zip archive"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (4, b"1AY&SY", "a bzip2 archive"),
    (0, b"\xfd7zXZ\x00", "an xz archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (0, b"Rar!\x1a\x07", "a rar archive"),
    (0, b"\x89HDF", "an HDF5 file"),
    (8, b'{"', "a safetensors file"),
    (257, b"ustar", "a tar archive"),
)
HEAD_BYTES = 512  # enough to tell all of them


class FileError(ValueError):
    """A file or a path that cannot be used; one line that names it, whatever characters the name has."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(message: str) -> str:
    """The message on one line: characters that no terminal shows, line feeds among them, are written out as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def user_path(path: object, what: str = "path") -> Path:
    """`path` as a Path. FileError, naming `what`, for what is no path, is empty or holds a NUL character."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise FileError(f"{what} is {shown(text)}, it must be a path")
    if not text:
        raise FileError(f"{what}: the path is empty")
    if "\0" in text:
        raise FileError(f"{what}: the path {shown(text)} holds a NUL character")
    return Path(text)


def shown(value: object, limit: int = 120) -> str:
    """A path or value as messages quote it: a type by its name, what is overlong by its beginning and its length."""
    if isinstance(value, type):
        return f"the type {value.__name__}"
    try:
        text = str(value) if isinstance(value, Path) else repr(value)
    except ValueError:  # CPython prints no such number
        return f"a number of more than {MAX_DIGITS} digits"
    return text if len(text) <= limit else f"{text[: limit // 2]}… ({len(text)} characters)"


def kind_of(path: Path) -> str | None:
    """The kind of thing at `path`: "a file", "a directory", "a pipe", "a socket" or "a device"; None where nothing is.

    FileError for a link to nowhere and wherever the system does not tell (a name too long, no permission).
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise FileError(f"{path} is a broken link to {os.readlink(path)}") from None
        return None
    except OSError as error:
        raise FileError(f"{shown(path)}: {error.strerror or error}") from None
    return next((words for test, words in _KINDS if test(mode)), "a file")


def missing(path: Path) -> str:
    """The sentence about a path where nothing is."""
    if path.parts and path.parts[0].startswith("~"):
        return f"{shown(path)}: No such file or directory; the ~ is only your shell's, write the home directory out"
    return f"{shown(path)}: No such file or directory"


def directory(path: object, what: str = "path", label: str = "") -> Path:
    """`path`, which must be a directory that can be listed; FileError otherwise. label: goes before it in messages."""
    path = user_path(path, what)
    kind = kind_of(path)
    if kind is None:
        raise FileError(label + missing(path))
    if kind != "a directory":
        raise FileError(f"{label}{shown(path)} is {kind}, a directory is needed")
    try:
        with os.scandir(path):
            pass
    except OSError as error:
        raise FileError(f"{label}{shown(path)}: {error.strerror or error}") from None
    return path


def regular_file(path: object, what: str = "path", label: str = "") -> Path:
    """`path`, where a file must be; FileError otherwise."""
    path = user_path(path, what)
    kind = kind_of(path)
    if kind is None:
        raise FileError(label + missing(path))
    if kind != "a file":
        raise FileError(f"{label}{shown(path)} is {kind}, a file is needed")
    return path


def new_directory(path: object, what: str = "path", label: str = "") -> Path:
    """`path`, which must be a directory or a place for one, as far as can be told without making it; FileError otherwise."""
    path = user_path(path, what)
    kind = kind_of(path)
    if kind not in (None, "a directory"):
        raise FileError(f"{label}{shown(path)} is {kind}, a directory is needed")
    there = path if kind else next(p for p in path.absolute().parents if kind_of(p))
    if kind_of(there) != "a directory":
        raise FileError(f"{label}{shown(path)}: {there} is {kind_of(there)}, not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise FileError(f"{label}{shown(path)}: {there} may not be written to (Permission denied)")
    return path


def new_file(path: object, what: str = "path", label: str = "") -> Path:
    """`path`, which must be a file or a free place in a directory, either of them writable; FileError otherwise."""
    path = user_path(path, what)
    kind, parent = kind_of(path), path.absolute().parent
    if kind not in (None, "a file"):
        raise FileError(f"{label}{shown(path)} is {kind}, a file is needed")
    if kind_of(parent) != "a directory":
        raise FileError(f"{label}{shown(path)}: there is no directory {parent}")
    if not os.access(parent, os.W_OK | os.X_OK) or (kind and not os.access(path, os.W_OK)):
        raise FileError(f"{label}{shown(path)}: may not be written to (Permission denied)")
    return path


def looks_like(head: bytes) -> str | None:
    """In words, what a file with these first bytes (`HEAD_BYTES` of them) is, where it is something known."""
    return next((words for at, magic, words in _MAGIC if head.startswith(magic, at)), None)


def head_of(path: Path) -> bytes:
    """The first `HEAD_BYTES` of a file; FileError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise FileError(f"{shown(path)}: {error.strerror or error}") from None


def read_text(path: object, what: str = "path", label: str = "", limit: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file, without the byte order mark that it may begin with.

    Reads at most `limit` bytes, and no further than the first that is no text. Process substitution (`<(command)`) is
    read too; a named pipe, a socket and a device are not. FileError names the file.
    """
    path = user_path(path, what)
    kind = kind_of(path)
    inherited = kind == "a pipe" and os.path.realpath(path).startswith("/proc/")
    name = label + shown(path)
    if kind is None:
        raise FileError(label + missing(path))
    if kind != "a file" and not inherited:
        raise FileError(f"{name} is {kind}, a file is needed")
    try:
        # Should a pipe have taken the file's place meanwhile, opening it does not wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | (0 if inherited else getattr(os, "O_NONBLOCK", 0))
        with open(os.open(path, flags), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > limit:
                raise FileError(f"{name} is {size:,} bytes long, at most {limit:,} are read: is it the right file?")
            return decoded(chunks_of(file), name, limit)
    except OSError as error:
        raise FileError(f"{name}: {error.strerror or error}") from None


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file, 1 MiB at a time."""
    return iter(lambda: file.read(_CHUNK), b"")


def decoded(chunks: Iterable[bytes], name: str, limit: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of `chunks` without a byte order mark; FileError as soon as they are no text or more than `limit`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces: list[str] = []
    head, done = b"", 0
    for chunk in chain(chunks, [b""]):  # the empty one ends the text
        head = head or chunk[:HEAD_BYTES]
        if b"\0" in head and (kind := looks_like(head)):
            raise FileError(f"{name}: {kind}, not a text")
        if not done and chunk.startswith(codecs.BOM_UTF8):
            chunk, done = chunk[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        done += len(chunk)
        if done > limit:
            raise FileError(f"{name} is longer than the {limit:,} bytes that are read: is it the right file?")
        try:
            pieces.append(decoder.decode(chunk, final=not chunk))
        except UnicodeDecodeError as error:
            # `error.object` is what the decoder had kept and the chunk, which ends at byte `done` of the file.
            raise FileError(f"{name}: {_not_text(head, done - len(error.object) + error.start)}") from None
    return "".join(pieces)


def _not_text(head: bytes, byte: int) -> str:
    if kind := looks_like(head):
        return f"{kind}, not a text"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "not UTF-8 but UTF-16: save it as UTF-8"
    return f"not UTF-8 (byte {byte})"


def read_json(path: object, what: str = "path", label: str = "", limit: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file (UTF-8, with or without a byte order mark); FileError as `read_text` and `parse_json`."""
    path = user_path(path, what)
    return parse_json(read_text(path, what, label, limit), label + shown(path))


def read_object(path: object) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file. FileError as `read_json`, and for another JSON value."""
    if kind_of(file := user_path(path)) is None:
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise FileError(f"{shown(file)}: must be a JSON object")
    return content


def parse_json(text: str | bytes, name: str) -> Any:
    """The value in a JSON text. FileError, beginning with `name`: what is not JSON (or not UTF-8), is nested too deeply
    for Python, has a key twice in one object, of which all but the last would be lost, or a number of too many digits."""
    if isinstance(text, bytes):
        text = decoded([text], f"{name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            raise FileError(f"{name} lists {next(key for key, _ in pairs if key in seen or seen.add(key))} twice")
        return result

    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique, parse_int=whole)
    except FileError:
        raise
    except json.JSONDecodeError as error:
        raise FileError(f"{name} is not JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise FileError(f"{name} is not JSON that can be read (nested too deeply)") from None
    except ValueError as error:
        raise FileError(f"{name} holds {error}") from None


def whole(digits: str) -> int:
    """The whole number that JSON's `digits` spell; ValueError beyond `MAX_DIGITS`."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, at most {MAX_DIGITS} are read")
    return int(digits)


def lone_surrogate(text: str) -> str | None:
    """The fault of a text that is no valid Unicode and so has no UTF-8, for a message that names the text; else None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}): only valid Unicode can be encoded"
    return None
