"""Files kept between runs for one user: `$XDG_CACHE_HOME/ninfer_jax/<room>`, each under the digest of all that made it.

What lies there is run, so it is read only where nobody but this user can write. Entries are written aside and renamed, so
that any number of processes may share them; the least recently used go when there are too many.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)


class KeptFiles:
    """The entries of one room. what: an entry in words, for warnings ("CPU kernel"); most: bytes of all together."""

    def __init__(self, room: str, suffix: str, what: str, most: Callable[[], int]):
        self._room, self._suffix, self._what, self._most = room, suffix, what, most
        self._told: set[str] = set()

    def place(self) -> Path:
        """The folder, there or not."""
        return base() / self._room

    def folder(self) -> Path | None:
        """The folder, made if need be; None, with a warning that says why, where nothing is kept."""
        try:
            place = self.place()
            for path in (place.parent, place):
                path.mkdir(parents=path is not place, exist_ok=True, mode=0o700)
                if why := unsafe(path.stat()):
                    raise PermissionError(f"{path} {why}")
        except (OSError, RuntimeError) as e:  # RuntimeError: there is no home
            self._warn(f"compiled {self._what}s are not kept: {e}")
            return None
        return place

    def read(self, key: str) -> bytes | None:
        """The bytes kept under `key`; None where there are none, and, with a warning, where they are damaged or somebody else's."""
        if (place := self.folder()) is None:
            return None
        path = place / f"{key}{self._suffix}"
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                why, found = unsafe(os.fstat(file.fileno())), file.read()
        except FileNotFoundError:
            return None
        except OSError as e:
            _log.warning("a kept %s is compiled again: %s: %s", self._what, path, e.strerror or e)
            return None
        digest, kept = found[:32], found[32:]
        if not why and hashlib.sha256(kept).digest() != digest:
            why = "is damaged"
        if why:
            _log.warning("a kept %s is compiled again: %s %s", self._what, path, why)
            return None
        with contextlib.suppress(OSError):  # another process has just removed it: the order of use is a nicety
            os.utime(path)
        return kept

    def write(self, key: str, kept: bytes) -> None:
        """Keeps `kept` under `key`, behind its SHA-256; a warning where that fails."""
        if (place := self.folder()) is None:
            return
        path, aside = place / f"{key}{self._suffix}", None
        try:
            with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:  # of mode 0600
                aside = file.name
                file.write(hashlib.sha256(kept).digest())
                file.write(kept)
            os.replace(aside, path)
            self._bound(place)
        except OSError as e:
            _log.warning("a compiled %s is not kept: %s: %s", self._what, path, e.strerror or e)
            if aside is not None:
                Path(aside).unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, key: str, waiting: Callable[[], object]) -> Iterator[None]:
        """No other process, and no other thread, is inside with this key. waiting: called where that takes waiting for.

        A lock goes with its process, however it ends. Where there are no locks nobody waits: entries are whole in any case."""
        fcntl = _locks()
        place = self.folder()
        if place is None or fcntl is None:
            yield
            return
        try:
            held = os.open(place / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(held, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(held)

    def _warn(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            _log.warning("%s", message)

    def _bound(self, place: Path) -> None:
        """Removes the least recently used until three quarters of the bytes are left, where there are more."""
        files = []
        for entry in os.scandir(place):
            with contextlib.suppress(FileNotFoundError):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        total, most = sum(size for _, size, _ in files), self._most()
        if total <= most:
            return
        for _, size, path in sorted(files):
            if total <= most * 3 // 4:
                return
            Path(path).unlink(missing_ok=True)
            total -= size


def base() -> Path:
    """The folder of all that this project keeps for a user: `$XDG_CACHE_HOME/ninfer_jax`, there or not. RuntimeError where there
    is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification has relative paths ignored.
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "ninfer_jax"


def unsafe(info: os.stat_result) -> str:
    """Why what has this `stat` cannot be trusted, to stand behind its name; "" where nobody else can write there."""
    if info.st_uid != os.getuid():
        return "belongs to somebody else"
    return "can be written by others: chmod go-w" if stat.S_IMODE(info.st_mode) & 0o022 else ""


def _locks():
    try:
        import fcntl
    except ImportError:  # no POSIX
        return None
    return fcntl
