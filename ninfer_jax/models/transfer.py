"""One file of a repository into the Hub's own cache, so that a fetch which was cut goes on where it was.

huggingface_hub gives up what it has of a file when the process ends: 5 GB of a shard, 16 GB of a GGUF file. Here the bytes come
into `blobs/<digest>.ninfer-jax.partial`, are asked for from where they end, are compared with the digest that the repository
lists, and become the blob. huggingface_hub then makes the rest of its cache, and takes the file for one of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ninfer_jax.files import FileError

Came = Callable[[int], None]


class Stopped(Exception):
    """The fetch was given up, by an interrupt or another file's error."""


@dataclass(frozen=True)
class Entry:
    """A file in a repository's listing. digest: SHA-256 of a large one, git's SHA-1 of a small one; the Hub names blobs so."""

    name: str
    size: int
    digest: str


class Transfer:
    """Fetches files of one commit. folder: of the repository in the cache. came: called with the bytes of each piece, from any
    thread."""

    def __init__(self, repo: str, commit: str, folder: Path, came: Came):
        self.repo, self.commit, self.folder, self.came = repo, commit, folder, came
        self.stop = threading.Event()

    def whole(self, entry: Entry) -> bool:
        """Whether the file is there, as long as it is listed."""
        snapshot = self.folder / "snapshots" / self.commit / entry.name
        return snapshot.is_file() and snapshot.stat().st_size == entry.size

    def there(self, entry: Entry) -> int:
        """Bytes of the file that need not be fetched."""
        blob = self._blob(entry)
        partial = _partial(blob)
        if blob.is_file():
            return entry.size
        return min(partial.stat().st_size, entry.size) if partial.is_file() else 0

    def fetch(self, entry: Entry) -> None:
        """The file, whole, in the cache. FileError for content that is not what the repository lists; what huggingface_hub raises
        otherwise."""
        from huggingface_hub import constants, hf_hub_download

        snapshot = self.folder / "snapshots" / self.commit / entry.name
        if snapshot.is_file() and snapshot.stat().st_size != entry.size:
            snapshot.unlink()  # half of what another program began
            self._blob(entry).unlink(missing_ok=True)
        # Who asks for Xet's speed, and files beyond what plain HTTP gives, do without going on in the midst of a file.
        plain = entry.size <= constants.MAX_HTTP_DOWNLOAD_SIZE and not constants.HF_XET_HIGH_PERFORMANCE
        if plain and not snapshot.is_file() and not self._blob(entry).is_file():
            self._fetch_blob(entry)
        made = hf_hub_download(self.repo, entry.name, revision=self.commit, tqdm_class=self._bar())
        if Path(made).stat().st_size != entry.size:
            raise FileError(
                f"{made} has {Path(made).stat().st_size:,} bytes, {self.repo} lists {entry.size:,}: remove it and start again"
            )

    def _fetch_blob(self, entry: Entry) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        blob = self._blob(entry)
        blob.parent.mkdir(parents=True, exist_ok=True)
        url = hf_hub_url(self.repo, entry.name, revision=self.commit)
        with _own(_partial(blob)) as file:  # a second process waits here
            had = file.tell()
            if blob.is_file():  # the first has done it
                _partial(blob).unlink(missing_ok=True)
                self.came(entry.size)
                return
            if had > entry.size:
                file.truncate(0)
                had = 0
            headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
            http_get(url, file, resume_size=had, headers=headers, expected_size=entry.size, tqdm_class=self._bar())
            file.flush()
            if digest_of(_partial(blob), entry) != entry.digest:
                _partial(blob).unlink()
                raise FileError(
                    f"{self.repo}: what came for {entry.name} is not what the repository lists ({entry.digest[:12]}…): "
                    "it was removed; start again, or check HF_ENDPOINT and proxies"
                )
            os.fsync(file.fileno())
            os.replace(_partial(blob), blob)

    def _blob(self, entry: Entry) -> Path:
        return self.folder / "blobs" / entry.digest

    def _bar(self) -> Any:
        """A class that huggingface_hub takes for one of progress bars."""
        came, stop = self.came, self.stop

        class Bar:
            def __init__(self, *_: object, **__: object):
                pass

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, n: float | None = 1) -> None:
                if stop.is_set():
                    raise Stopped
                came(int(n or 0))

            def close(self) -> None:
                pass

            def set_postfix_str(self, *_: object, **__: object) -> None:
                pass

            def refresh(self, *_: object, **__: object) -> None:
                pass

        return Bar


def digest_of(file: Path, entry: Entry) -> str:
    """The digest that `entry` would have for a file of this content."""
    sha = hashlib.sha256() if len(entry.digest) == 64 else hashlib.sha1(b"blob %d\0" % entry.size)
    with file.open("rb") as content:
        while block := content.read(1 << 22):
            sha.update(block)
    return sha.hexdigest()


@contextmanager
def _own(partial: Path) -> Iterator[BinaryIO]:
    """The partial file, open to be appended to, and no other process's."""
    while True:
        with partial.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat()):
                yield file
                return
        # Whoever had it has renamed or removed it.


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.ninfer-jax.partial")


@contextmanager
def quiet() -> Iterator[None]:
    """huggingface_hub without its warnings, which are about what is tried again; what fails is said in one line."""
    logger = logging.getLogger("huggingface_hub.file_download")
    logger.addFilter(_errors_alone)
    try:
        yield
    finally:
        logger.removeFilter(_errors_alone)


def _errors_alone(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
