"""The directory that keeps pages and checkpoints from one start of an engine to the next.

Whatever it meets there, the engine goes on: a file that is foreign, damaged or cut off is passed over with one line, and left
where it is; a directory that cannot be written, or a disk that is full, ends the writing with one line.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_jax.cache.container import BadFile, Contents, Identity, packed, read_head, read_piece, write
from ninfer_jax.cache.counters import Counters
from ninfer_jax.files import printable, shown

PAGES, STATE = "pages", "state"  # kinds of files
_ASIDE = re.compile(r"\..+\.(\d+)\.tmp")

Notice = Callable[[str], None]


@dataclass(eq=False)
class File:
    """A file of the cache. refs: pages of it that are needed, or 1 for a state's."""

    path: Path
    contents: Contents
    refs: int = 0


class DiskTier:
    """At most `budget` bytes of files of one `identity` in `folder`, which is made if need be, for its owner alone.

    notice: called with a line for everything that goes wrong.
    """

    def __init__(self, folder: Path, identity: Identity, budget: int, notice: Notice, counters: Counters):
        self.folder, self.budget, self.used = folder, budget, 0
        self._identity, self._notice, self._counters = identity, notice, counters
        self.writable = True
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(folder)
            trial = folder / f".trial.{os.getpid()}.tmp"
            with open(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb"):
                pass
            trial.unlink()
        except OSError as error:
            self._stop_writing(error)

    def scan(self) -> list[File]:
        """All whole files of this identity, oldest use first, their pieces not yet looked at."""
        found: list[tuple[float, File]] = []
        for path in self._paths():
            try:
                contents = read_head(path, self._identity)
                found.append((path.stat().st_mtime, File(path, contents)))
            except (BadFile, OSError) as error:
                self.bad(path, error if isinstance(error, BadFile) else BadFile("cannot be read"))
        files = [file for _, file in sorted(found, key=lambda pair: (pair[0], pair[1].path.name))]
        self._count(sum(file.contents.size for file in files))
        return files

    def head(self, kind: str, fields: Mapping[str, Any], pieces: Sequence[np.ndarray]) -> bytes:
        """The beginning of a file, for `write`: its size is that of this and the pieces."""
        return packed(kind, self._identity, fields, pieces)

    def write(self, name: str, kind: str, fields: Mapping[str, Any], head: bytes, pieces: Sequence[np.ndarray]) -> File | None:
        """The file, written whole; None where that fails, which ends the writing."""
        path, size = self.folder / name, len(head) + sum(piece.nbytes for piece in pieces)
        if not self.writable or self.used + size > self.budget:
            return None
        try:
            write(path, head, pieces)
            contents = read_head(path, self._identity)
        except (OSError, BadFile) as error:
            self._stop_writing(error)
            return None
        self._count(size)
        self._counters.disk_written += size
        return File(path, contents)

    def read(self, file: File, index: int) -> np.ndarray:
        """A piece; BadFile, told once by the caller through `bad`, where it is not what was written."""
        array = read_piece(file.path, file.contents, index)
        self._counters.disk_read += array.nbytes
        return array

    def touch(self, file: File) -> None:
        """Let the next start know that the file was used."""
        with contextlib.suppress(OSError):
            os.utime(file.path)

    def bad(self, path: Path, error: BadFile) -> None:
        """Tell that a file is passed over."""
        self._counters.bad_files += 1
        self._notice(printable(f"cache_dir: {shown(path)} {error}; it is passed over"))

    def release(self, file: File) -> None:
        """One piece of the file is needed no longer; with the last the file goes."""
        file.refs -= 1
        if file.refs <= 0:
            self.drop(file)

    def drop(self, file: File) -> None:
        """Delete the file."""
        self._count(-file.contents.size)
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)

    def _paths(self) -> Iterator[Path]:
        try:
            with os.scandir(self.folder) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except OSError as error:
            self._notice(printable(f"cache_dir: {shown(self.folder)}: {error.strerror or error}; nothing is read from it"))
            return
        yield from (self.folder / name for name in names)

    def _count(self, size: int) -> None:
        self.used += size
        self._counters.disk_bytes = self.used

    def _stop_writing(self, error: Exception) -> None:
        if self.writable:
            self.writable = False
            reason = getattr(error, "strerror", None) or error
            self._notice(
                printable(f"cache_dir: {shown(self.folder)}: {reason}; nothing more is written to it until the next start")
            )


def _remove_leftovers(folder: Path) -> None:
    """Delete what processes were writing that are no more."""
    for path in folder.iterdir():
        if (aside := _ASIDE.fullmatch(path.name)) and not _runs(int(aside[1])):
            path.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
