"""Converted checkpoints kept between runs: `$XDG_CACHE_HOME/ninfer_jax/models`, one directory a model.

    <model>/<recipe>-<key>/          a finished artifact, renamed to this when it was whole
    <model>/<recipe>-<key>.partial/  one in the making, with which the next run goes on
    <model>/<recipe>-<key>.json      what it was made of, for `ninfer-jax models`
    <model>/<recipe>-<key>.lock      held by the process that makes it
    hub/<name>.json                  what a Hub id was last fetched as (`ninfer_jax.models.hub`)

The key is a digest of everything that decides the result: the source, the recipe and the converter's code. What lies there is
trusted, so it is used only where nobody but this user can write.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.files import FileError, read_object
from pallas_kernels import kept_files

MANIFEST = "manifest.json"  # of an artifact, written last
RECORDS = "hub"  # no model's directory has this name: theirs have two dashes or a digest
_PACKAGE = Path(__file__).resolve().parents[1]
# The code that decides what an artifact holds.
_CODE = ("checkpoints", "config", "model", "engine/convert.py", "engine/draft_head.py", "../pallas_kernels/matmul/quantised.py")

Say = Callable[[str], None]


def root() -> Path:
    """The directory of all that is kept, which may not be there yet. FileError where there is no home to have one in."""
    try:
        return kept_files.base() / "models"
    except RuntimeError:
        raise FileError("there is no home directory to keep models in: set XDG_CACHE_HOME to a directory of yours") from None


def safe(path: Path) -> Path:
    """`path`, a directory below or at `root()`, made if need be. FileError where others can write to it or own it, or where
    it cannot be made."""
    try:
        top = root()
        for place in (top.parent, top, *([path] if path != top else [])):
            place.mkdir(parents=place == top.parent, exist_ok=True, mode=0o700)
            check_safe(place)
    except OSError as error:
        raise FileError(
            f"{error.filename or path}: {error.strerror or error}; models are kept there, or below XDG_CACHE_HOME where that is set"
        ) from None
    return path


def check_safe(place: Path) -> None:
    """FileError for a directory whose content somebody else may have put there."""
    about = place.stat()
    if about.st_uid != os.geteuid():
        raise FileError(f"{place} belongs to somebody else: nothing in it is used; set XDG_CACHE_HOME to a directory of yours")
    if stat.S_IMODE(about.st_mode) & 0o022:
        raise FileError(f"{place} can be written by others: nothing in it is used; `chmod go-w {place}` if all in it is yours")


@functools.cache
def code_digest() -> str:
    """Digest of the converter's sources."""
    sha = hashlib.sha256()
    for part in _CODE:
        base = _PACKAGE / part
        for file in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            sha.update(f"{file.name}\n".encode() + file.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return sha.hexdigest()[:16]


@dataclass(frozen=True)
class Wanted:
    """One conversion. model: as it was named. identity: of its source, as JSON. options: of the conversion."""

    model: str
    identity: Mapping[str, Any]
    recipe: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        whole = {"source": self.identity, "recipe": self.recipe, "options": self.options, "code": code_digest()}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        name = re.sub(r"[^A-Za-z0-9._-]+", "--", self.model).strip("-.")[-80:] or "model"
        return root() / (f"{name}-dir" if name == RECORDS else name)

    @property
    def place(self) -> Path:
        return self.folder / f"{self.recipe}-{self.key}"


def finished(wanted: Wanted) -> Path | None:
    """The artifact, where it has been made; None otherwise."""
    if not (wanted.place / MANIFEST).is_file():
        return None
    safe(wanted.folder)
    check_safe(wanted.place)
    with contextlib.suppress(OSError):
        os.utime(wanted.place)  # when it was last used
    return wanted.place


def make(wanted: Wanted, run: Callable[[Path, int], None], same: Callable[[], bool], say: Say) -> Path:
    """The artifact, made by `run(directory, lock)` unless it is there; another process that is at it is waited for.

    run goes on with what a killed one left in the directory, and the whole is renamed when it is finished. same: whether the
    source is still what it was: one that changed meanwhile makes no artifact.
    """
    safe(wanted.folder)
    with locked(wanted.place.with_name(f"{wanted.place.name}.lock"), f"{wanted.model} as {wanted.recipe}", say) as lock:
        if (there := finished(wanted)) is not None:
            return there
        partial = wanted.place.with_name(f"{wanted.place.name}.partial")
        partial.mkdir(mode=0o700, exist_ok=True)
        check_safe(partial)
        about = {"model": wanted.model, "source": wanted.identity, "recipe": wanted.recipe, "code": code_digest()}
        write_json(
            wanted.place.with_name(f"{wanted.place.name}.json"), about | {"options": wanted.options, "made": int(time.time())}
        )
        run(partial, lock)
        if not same():
            shutil.rmtree(partial, ignore_errors=True)
            raise FileError(f"{wanted.model} was changed while it was converted: nothing is kept of that; start again")
        os.replace(partial, wanted.place)
    return wanted.place


@contextlib.contextmanager
def locked(file: Path, what: str, say: Say) -> Iterator[int]:
    """Inside, no other process has the lock `file`; one that has it is waited for. The kernel takes it from a process that dies;
    what such a one left is said. Gives the open lock, for a process that works for this one."""
    handle = _locked(file, what, say)
    try:
        if holder := _holder(handle):
            say(f"{what}: process {holder} ended in the midst of it; going on from there")
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield handle
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _locked(file: Path, what: str, say: Say) -> int:
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{what}: process {_holder(handle) or 'of somebody'} is at it; waiting")
                fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(file)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # whoever had it has removed it


def _holder(handle: int) -> str:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdigit() else ""


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """The JSON file, at one stroke: whoever reads sees the old one or the whole new one."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    os.replace(aside, file)


@dataclass(frozen=True)
class Kept:
    """One conversion that is there. state: "whole", "unfinished", or "old" where a newer program would make it again."""

    model: str
    recipe: str
    state: str
    bytes: int
    path: Path

    @property
    def name(self) -> str:
        """The name to remove this one alone by."""
        return f"{self.path.parent.name}/{self.path.name.removesuffix('.partial')}"


def listed() -> list[Kept]:
    """All conversions, by model."""
    found = []
    for about in sorted(root().glob("*/*.json")) if root().is_dir() else []:
        if about.parent.name == RECORDS:
            continue
        said, place = read_object(about), about.with_suffix("")
        partial = place.with_name(f"{place.name}.partial")
        for path, state in ((place, "whole" if said.get("code") == code_digest() else "old"), (partial, "unfinished")):
            if path.is_dir():
                found.append(Kept(str(said.get("model")), str(said.get("recipe")), state, bytes_of(path), path))
    return found


def remove(kept: Kept) -> None:
    """Remove a conversion and what belongs to it. FileError where it is being made, or cannot be removed."""
    place = kept.path.with_name(kept.path.name.removesuffix(".partial"))
    lock = place.with_name(f"{place.name}.lock")
    check_safe(kept.path.parent)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(f"{kept.name} is being made by process {_holder(handle)}: stop that first") from None
        aside = place.with_name(f".{place.name}.removed")
        try:
            shutil.rmtree(aside, ignore_errors=True)  # what a killed removal left
            os.replace(kept.path, aside)  # nobody takes half of it for an artifact
            shutil.rmtree(aside)
        except OSError as error:
            raise FileError(f"{kept.path}: {error.strerror or error}") from None
        if not place.is_dir():
            place.with_name(f"{place.name}.json").unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):
        kept.path.parent.rmdir()  # if it was the last


def bytes_of(path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def size(count: float) -> str:
    """Bytes in words: "54.2 GB"."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
