"""One file of the cache or of a saved conversation: a header in JSON, then pieces of bytes, all under digests.

    16 bytes   magic
     8 bytes   size of the header, little endian
    32 bytes   blake2b of the header
    header     {"kind", "identity", "fields", "pieces": [[size, blake2b], ...]}
    pieces     one after another

A file is written aside and renamed when it is whole, so a process that is killed leaves a piece of a temporary file, which the
next one removes. Nothing is believed of a file before its digests agree; what a power failure leaves is found by them too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"ninfer-jax kept1"
_FIXED = len(MAGIC) + 8 + 32
MAX_HEADER = 64 << 20

Identity = Mapping[str, str | int]


class BadFile(Exception):
    """A file that cannot be used, in a few words that follow its name."""


@dataclass(frozen=True)
class Contents:
    """The contents of a whole file. pieces: (offset, size, digest) each; size: of the file."""

    kind: str
    fields: dict[str, Any]
    pieces: tuple[tuple[int, int, str], ...]
    size: int


def packed(kind: str, identity: Identity, fields: Mapping[str, Any], pieces: Sequence[np.ndarray]) -> bytes:
    """The bytes of a file up to its pieces. pieces: contiguous uint8 arrays."""
    described = [[piece.nbytes, _digest(piece)] for piece in pieces]
    header = json.dumps({"kind": kind, "identity": dict(identity), "fields": dict(fields), "pieces": described}).encode()
    return MAGIC + len(header).to_bytes(8, "little") + bytes.fromhex(_digest(header)) + header


def write(path: Path, head: bytes, pieces: Sequence[np.ndarray]) -> None:
    """Write a whole file or none, for its owner alone to read. OSError where that fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(head)
            for piece in pieces:
                file.write(piece.data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_head(path: Path, identity: Identity | None) -> Contents:
    """The contents of a file, its pieces not yet looked at. BadFile where it is no whole file of this identity (None: of any)."""
    with _open(path) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(_FIXED) or b""
        if not start.startswith(MAGIC) or len(start) < _FIXED:
            raise BadFile("is not a file of this cache" if MAGIC[: len(start)] != start[: len(MAGIC)] else "is cut off")
        length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 8], "little")
        if length > min(MAX_HEADER, size - _FIXED):
            raise BadFile("is cut off or damaged")
        header = file.read(length)
    if bytes.fromhex(_digest(header)) != start[-32:]:
        raise BadFile("is damaged")
    try:
        found = json.loads(header)
        kind, written, fields, pieces = str(found["kind"]), dict(found["identity"]), dict(found["fields"]), []
        at = _FIXED + length
        for piece_size, digest in found["pieces"]:
            pieces.append((at, int(piece_size), str(digest)))
            at += int(piece_size)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadFile("is damaged") from None
    if identity is not None and (different := difference(written, identity)):
        raise BadFile(f"is of another engine: {different}")
    if at != size or any(piece[1] < 0 for piece in pieces):
        raise BadFile(f"has {size:,} bytes and not {at:,}")
    return Contents(kind, fields, tuple(pieces), size)


def read_piece(path: Path, contents: Contents, index: int) -> np.ndarray:
    """A piece, uint8 `[size]`, with the digest that its header told when it was read. BadFile for anything else."""
    at, size, digest = contents.pieces[index]
    array, read = np.empty(size, np.uint8), 0
    try:
        with _open(path) as file:
            file.seek(at)
            while read < size and (more := file.readinto(array[read:].data)):
                read += more
    except OSError as error:
        raise BadFile(f"cannot be read ({error.strerror})") from None
    if read != size or _digest(array) != digest:
        raise BadFile("is damaged")
    return array


def difference(written: Mapping[str, Any], wanted: Identity) -> str:
    """In words, the first field of `wanted` that is another in `written`; "" if there is none."""
    for field in [*wanted, *(f for f in written if f not in wanted)]:
        if written.get(field) != wanted.get(field):
            return f"{field} is {_short(written.get(field))}, here {_short(wanted.get(field))}"
    return ""


def _open(path: Path) -> Any:
    """The file, opened for reading; BadFile for links, pipes, other people's files and whatever cannot be opened."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadFile("is a link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})") from None
    about = os.fstat(number)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        os.close(number)
        raise BadFile("is no regular file" if not stat.S_ISREG(about.st_mode) else "belongs to another user")
    return open(number, "rb", buffering=0)


def _digest(data: bytes | np.ndarray) -> str:
    return hashlib.blake2b(data.data if isinstance(data, np.ndarray) else data, digest_size=32).hexdigest()


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
