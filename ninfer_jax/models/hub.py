"""A model of the Hub, in the Hub's own cache: fetched once, by the files that are needed, and then used without asking again.

What a name was fetched as is recorded (`kept.root()/hub`): its commit and files. While these are there no network is needed, and
no newer commit of a branch slips in; `ninfer-jax models fetch NAME` looks for one. Tokens, mirrors, offline switches and the place
of the cache are huggingface_hub's (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_CACHE). Nothing that is fetched is ever run.
"""

from __future__ import annotations

import re
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ninfer_jax.files import FileError, read_object
from ninfer_jax.models import kept
from ninfer_jax.models.choice import CONFIG, INDEX, checked_config, small_files, weight_files
from ninfer_jax.models.hub_errors import NoConnection, told
from ninfer_jax.models.kept import Say, size
from ninfer_jax.models.names import HubName
from ninfer_jax.models.transfer import Entry, Transfer, quiet

Tell = Callable[[str, int, int], None]
AT_ONCE = 4  # files
SLACK = 64 << 20  # bytes that a fetch leaves on the disk
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository as far as it was fetched. files: name -> bytes. weights: of these, the one to open first; ""
    where shapes alone were asked for. quantised: whether its weights have to be converted to be run."""

    name: HubName
    commit: str
    files: Mapping[str, int]
    weights: str
    quantised: bool

    @property
    def folder(self) -> Path:
        return repository(self.name.repo) / "snapshots" / self.commit

    @property
    def source(self) -> Path:
        """The checkpoint: its directory, or its GGUF file."""
        return self.folder / self.weights if self.weights.endswith(".gguf") else self.folder

    @property
    def whole(self) -> bool:
        """Whether every file is there, as long as it was."""
        return all((f := self.folder / name).is_file() and f.stat().st_size == n for name, n in self.files.items())

    @property
    def identity(self) -> dict[str, Any]:
        return {"repo": self.name.repo, "commit": self.commit, "files": sorted(self.files)}

    def as_json(self) -> dict[str, Any]:
        """The record of it."""
        about = {"repo": self.name.repo, "revision": self.name.revision, "file": self.name.file, "commit": self.commit}
        return about | {"files": dict(self.files), "weights": self.weights, "quantised": self.quantised}


def cache() -> Path:
    """The Hub's cache on this machine."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository(repo: str) -> Path:
    """The directory of a repository in it."""
    from huggingface_hub.file_download import repo_folder_name

    return cache() / repo_folder_name(repo_id=repo, repo_type="model")


def recorded(name: HubName) -> Snapshot | None:
    """The snapshot that `name` was last fetched as, whether its files are still there or not; None where it never was."""
    return _snapshot(name, read_object(_record(name)))


def records() -> list[Snapshot]:
    """All of them."""
    found = []
    for file in sorted((kept.root() / kept.RECORDS).glob("*.json")):
        said = read_object(file)
        if isinstance(said.get("repo"), str) and isinstance(said.get("revision"), str):
            found.append(_snapshot(HubName(said["repo"], said["revision"], said.get("file")), said))
    return [snapshot for snapshot in found if snapshot is not None]


def forget(name: HubName) -> bool:
    """Remove the record of a name; whether there was one."""
    there = _record(name).is_file()
    _record(name).unlink(missing_ok=True)
    return there


def fetch(name: HubName, say: Say, tell: Tell, *, weights: bool = True, again: bool = False) -> Snapshot:
    """The snapshot, whole. weights: False for config and tokenizer alone. again: ask for a newer commit although what was fetched
    is there. say: told what is fetched, how much of it and where to, before it is. tell: ("download", bytes done, in all).

    FileError, one line: whatever keeps it from being whole (`hub_errors`), and a disk that is too small."""
    before = recorded(name)
    if before is not None and not again and before.whole and (before.weights or not weights):
        _trusted(name)
        return before
    where = str(cache())
    try:
        with told(name, where):
            commit, entries = _listing(name)
    except NoConnection as why:
        if (there := _in_the_cache(name, weights)) is None:
            raise
        say(f"{why}; going on with commit {there.commit[:8]}, which is whole in {where}")
        _trusted(name)
        return there
    sizes = {entry.name: entry.size for entry in entries.values()}
    with told(name, where), quiet():
        snapshot = _fetch(name, commit, entries, sizes, weights, say, tell)
    _trusted(name)
    if weights:
        kept.write_json(kept.safe(kept.root() / kept.RECORDS) / _record(name).name, snapshot.as_json())
        if before is not None and before.commit != commit:
            say(f"{name} was {before.commit[:8]} and is now {commit[:8]}")
    return snapshot


def _fetch(
    name: HubName, commit: str, entries: Mapping[str, Entry], sizes: Mapping[str, int], weights: bool, say: Say, tell: Tell
) -> Snapshot:
    lock, done, total = threading.Lock(), 0, 0

    def came(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            tell("download", min(done, total), total)

    transfer = Transfer(name.repo, commit, repository(name.repo), came)
    small = [entries[n] for n in small_files(sizes) if weights or n != INDEX]
    # Which weights there are is known without a byte of them, but for what an index says.
    listed: list[str] = []
    if weights and INDEX in sizes and name.file is None:
        transfer.fetch(entries[INDEX])
        listed = index_files(transfer.folder / "snapshots" / commit / INDEX)
    chosen = []
    if weights or CONFIG not in sizes:
        chosen = weight_files(name, sizes, listed)
        checked_config(name, sizes, chosen)
    if not weights and chosen:
        raise FileError(f"{name} has its config inside {chosen[0]}: fetch that first, `ninfer-jax models fetch {name}`")
    wanted = [*small, *(entries[n] for n in chosen if weights)]
    lacking = [(e, e.size - transfer.there(e)) for e in wanted if not transfer.whole(e)]
    total = sum(bytes for _, bytes in lacking)
    _announce(name, commit, wanted, total, say)
    done = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for future in as_completed([pool.submit(transfer.fetch, entry) for entry, _ in lacking]):
                future.result()
        except BaseException:
            transfer.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if name.revision != commit:  # as huggingface_hub does it: for who asks for the branch without a network
        ref = transfer.folder / "refs" / name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, "utf-8")
    folder = transfer.folder / "snapshots" / commit
    first = chosen[0] if weights else ""
    return Snapshot(name, commit, {e.name: e.size for e in wanted}, first, bool(first) and _quantised(folder, first))


def _announce(name: HubName, commit: str, wanted: list[Entry], total: int, say: Say) -> None:
    from huggingface_hub import constants

    there = next(p for p in (cache(), *cache().absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if total:
        whole = sum(entry.size for entry in wanted)
        here = f", {size(whole - total)} of that are here" if total < whole else ""
        say(
            f"{name} (commit {commit[:8]}) from {constants.ENDPOINT}: {len(wanted)} files, {size(whole)}{here}; "
            f"into {cache()}, where {size(free)} are free"
        )
    if total and total + SLACK > free:
        raise FileError(
            f"{name}: {total:,} bytes are to be fetched, {free:,} are free in {cache()}: make room, or set HF_HUB_CACHE to "
            "another disk"
        )


def _listing(name: HubName) -> tuple[str, dict[str, Entry]]:
    """The commit of the revision, and its files."""
    from huggingface_hub import HfApi, constants, errors

    if constants.is_offline_mode():
        raise errors.OfflineModeIsEnabled("")
    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        raise FileError(f"{name}: {constants.ENDPOINT} names no commit: is it a Hub? (HF_ENDPOINT)")
    entries = {}
    for sibling in info.siblings or []:
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        bytes = sibling.lfs.size if sibling.lfs else sibling.size
        path = sibling.rfilename
        if digest is None or bytes is None or not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", digest):
            continue
        if path.startswith("/") or ".." in path.split("/") or "\\" in path or not path.isprintable():
            raise FileError(
                f"{name}: {constants.ENDPOINT} lists a file {path!r}, which is no name in a repository: nothing is fetched"
            )
        entries[path] = Entry(path, bytes, digest)
    return info.sha, entries


def _in_the_cache(name: HubName, weights: bool) -> Snapshot | None:
    """The snapshot that any program has put into the cache, where it is a whole model."""
    ref = repository(name.repo) / "refs" / name.revision
    commit = name.revision if _COMMIT.fullmatch(name.revision) else ref.read_text("utf-8").strip() if ref.is_file() else ""
    folder = repository(name.repo) / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    try:
        chosen = weight_files(name, sizes, index_files(folder / INDEX) if INDEX in sizes else []) if weights else [""]
        if weights:
            checked_config(name, sizes, chosen)
        elif CONFIG not in sizes:
            return None
    except FileError:
        return None
    files = {n: sizes[n] for n in [*small_files(sizes), *chosen] if n in sizes}
    return Snapshot(name, commit, files, chosen[0], weights and _quantised(folder, chosen[0]))


def index_files(index: Path) -> list[str]:
    """The files that an index names, in its order. FileError for one that is none."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) and "/" not in file for file in found.values()):
        raise FileError(f"{index} has no weight_map of tensor names to files")
    return list(dict.fromkeys(found.values()))


def quantised_config(folder: Path) -> bool:
    """Whether the files beside safetensors say that these hold codes, and no plain numbers."""
    config = read_object(folder / CONFIG)
    inner = config.get("text_config")
    own = inner.get("quantization_config") if isinstance(inner, dict) else None
    return bool(own or config.get("quantization_config")) or (folder / "quantize_config.json").is_file()


def _quantised(folder: Path, first: str) -> bool:
    return first.endswith(".gguf") or quantised_config(folder)


def _trusted(name: HubName) -> None:
    """FileError for a directory of the repository that everybody may write to: its files are read without a digest."""
    folder = repository(name.repo)
    for place in (cache(), folder):
        if stat.S_IMODE(place.stat().st_mode) & 0o002:
            raise FileError(f"{place} can be written by everybody: nothing in it is used; `chmod o-w {place}`, or set HF_HUB_CACHE")


def _record(name: HubName) -> Path:
    return kept.root() / kept.RECORDS / f"{quote(str(name), safe='@:')}.json"


def _snapshot(name: HubName, said: Mapping[str, Any]) -> Snapshot | None:
    """The snapshot of a record; None for one that is none."""
    files, commit = said.get("files"), said.get("commit")
    if not isinstance(files, dict) or not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        return None
    if not all(isinstance(n, str) and ".." not in n.split("/") and isinstance(b, int) for n, b in files.items()):
        return None
    weights = said.get("weights")
    return (
        Snapshot(name, commit, files, weights, bool(said.get("quantised")))
        if isinstance(weights, str) and weights in files
        else None
    )
