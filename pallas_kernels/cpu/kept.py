"""Machine code kept between runs: `$XDG_CACHE_HOME/ninfer_jax/cpu`, one file a module, under the digest of all that made it.

What lies there is run, so it is read only where nobody but this user can write. Entries are written aside and renamed, so
that any number of processes may share them; the least recently used go when there are too many.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

MOST_BYTES = 64 * 2**20  # a 27B engine's kernels are 1 MB; the rest is for other shapes and for who works on kernels
_log = logging.getLogger(__name__)


@functools.cache
def folder() -> Path | None:
    """The folder, made if need be; None, with a warning that says why, where nothing is kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ninfer_jax"
    place = base / "cpu"
    try:
        for path in (base, place):
            path.mkdir(parents=path is base, exist_ok=True, mode=0o700)
            if why := _unsafe(path.stat()):
                raise PermissionError(f"{path} {why}")
    except OSError as e:
        _log.warning("compiled CPU kernels are not kept: %s", e)
        return None
    return place


def read(key: str) -> bytes | None:
    """The code kept under `key`; None where there is none, and, with a warning, where it is damaged or somebody else's."""
    if (place := folder()) is None:
        return None
    path = place / f"{key}.o"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            why, data = _unsafe(os.fstat(file.fileno())), file.read()
    except FileNotFoundError:
        return None
    except OSError as e:
        _log.warning("a kept CPU kernel is compiled again: %s: %s", path, e.strerror or e)
        return None
    digest, code = data[:32], data[32:]
    if not why and hashlib.sha256(code).digest() != digest:
        why = "is damaged"
    if why:
        _log.warning("a kept CPU kernel is compiled again: %s %s", path, why)
        return None
    with contextlib.suppress(OSError):  # another process has just removed it: the order of use is a nicety
        os.utime(path)
    return code


def write(key: str, code: bytes) -> None:
    """Keeps `code` under `key`, behind its SHA-256; a warning where that fails."""
    if (place := folder()) is None:
        return
    path, aside = place / f"{key}.o", None
    try:
        with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:  # of mode 0600
            aside = file.name
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(aside, path)
        _bound(place)
    except OSError as e:
        _log.warning("a compiled CPU kernel is not kept: %s: %s", path, e.strerror or e)
        if aside is not None:
            Path(aside).unlink(missing_ok=True)


def _unsafe(info: os.stat_result) -> str:
    if info.st_uid != os.getuid():
        return "belongs to somebody else"
    return "can be written by others: chmod go-w" if stat.S_IMODE(info.st_mode) & 0o022 else ""


def _bound(place: Path) -> None:
    """Removes the least recently used until three quarters of `MOST_BYTES` are left, where there are more."""
    files = []
    for entry in os.scandir(place):
        try:
            files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        except FileNotFoundError:
            continue
    total = sum(size for _, size, _ in files)
    if total <= MOST_BYTES:
        return
    for _, size, path in sorted(files):
        if total <= MOST_BYTES * 3 // 4:
            return
        Path(path).unlink(missing_ok=True)
        total -= size
