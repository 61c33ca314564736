"""Prefixes of prompts that need no second prefill: found, kept, given back. Knows bytes and token ids, no device and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ninfer_jax.cache.container import BadFile, Identity
from ninfer_jax.cache.counters import Counters
from ninfer_jax.cache.disk import DiskTier, Notice
from ninfer_jax.cache.policy import KINDS, Mark, superfluous
from ninfer_jax.cache.store import NoRoom, Store
from ninfer_jax.cache.tree import DISK, HOST, TIERS, Checkpoint, Media, Tree, key_of
from ninfer_jax.config import PAGE


@dataclass(frozen=True)
class Image:
    """All that a sequence of `length` tokens is on a device, as bytes on the host.

    state: recurrent and convolution states. pages: all of them, first to last, the one that its last token is in included.
    """

    length: int
    state: np.ndarray
    pages: list[np.ndarray]


class Hit:
    """The known part of a prompt. length: tokens that a checkpoint covers, 0 for none; tier: "host", "disk" or None.

    seen: tokens that match pages seen before, whether a checkpoint is there or not. What it covers stays until `end`, which
    `with` calls.
    """

    def __init__(self, cache: PrefixCache, tokens: Sequence[int], media: Sequence[Media], most: int | None, counted: bool):
        self._cache, self._tokens, self._media, self._counted = cache, tokens, media, counted
        self.seen = self._pin(most)

    def load(self) -> Image | None:
        """The bytes. Where those of a checkpoint cannot be had any more, those of the deepest one before it, with its length and
        tier; None, and the hit is a miss, where there is none."""
        counters = self._cache.counters
        while (checkpoint := self._checkpoint) is not None:
            if (image := self._cache.image(checkpoint)) is not None:
                if self._counted:
                    on_host = self.tier == TIERS[HOST]
                    counters.hits_host += on_host
                    counters.hits_disk += not on_host
                    counters.cached_host += self.length * on_host
                    counters.cached_disk += self.length * (not on_host)
                return image
            counters.failed += 1
            self.end()
            self._pin(self.length - 1)
        return None

    def _pin(self, most: int | None) -> int:
        checkpoint, seen = self._cache.match(self._tokens, self._media, most)
        self._checkpoint = checkpoint
        self.length = 0 if checkpoint is None else checkpoint.length
        self.tier = None if checkpoint is None else TIERS[HOST if checkpoint.within(HOST) else DISK]
        if checkpoint is not None:
            checkpoint.pins += 1
        return seen

    def end(self) -> None:
        """Rely on it no longer."""
        if self._checkpoint is not None:
            self._checkpoint.pins -= 1
            self._checkpoint = None

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


class PrefixCache:
    """Pages and checkpoints of all sequences that ran here, at most `host_bytes` of them in host memory, more in `folder`.

    page_bytes, state_bytes: of a page and of a checkpoint's states. folder: kept from start to start, up to `disk_bytes`; None for
    none. identity: what must be equal for bytes to mean the same: model, format, code. notice: called with a line for all that goes
    wrong with files; nothing that does stops the engine. Not thread-safe.
    """

    def __init__(
        self,
        page_bytes: int,
        state_bytes: int,
        host_bytes: int,
        *,
        folder: Path | None = None,
        disk_bytes: int = 0,
        identity: Identity | None = None,
        notice: Notice = lambda line: None,
    ):
        self.page_bytes, self.state_bytes, self.host_bytes = page_bytes, state_bytes, host_bytes
        self.counters = Counters()
        self._place = (folder, identity or {}, disk_bytes, notice)
        self._unwritten: list[Checkpoint] = []
        self._changing = False
        self._begin()

    def find(self, tokens: Sequence[int], media: Sequence[Media] = (), most: int | None = None, *, counted: bool = True) -> Hit:
        """The deepest checkpoint of at most `most` tokens (None: of all) on the way of a prompt. counted: it is a request's."""
        if counted:
            self.counters.lookups += 1
            self.counters.prompt_tokens += len(tokens)
        return Hit(self, tokens, media, most, counted)

    def match(self, tokens: Sequence[int], media: Sequence[Media] = (), most: int | None = None) -> tuple[Checkpoint | None, int]:
        """(the deepest checkpoint on the way, tokens that match pages seen before), uncounted."""
        with self._change():
            found = self._tree.match(_array(tokens), media, most)
            if found.checkpoint is not None:
                self._tree.touch(found.checkpoint)
            return found.checkpoint, found.pages * PAGE

    def image(self, checkpoint: Checkpoint) -> Image | None:
        """The bytes of a checkpoint, brought to host memory if need be; None where that fails."""
        if checkpoint not in self._tree.checkpoints:
            return None  # of a tree that was given up
        with self._change():
            try:
                self._store.bring(checkpoint)
            except (NoRoom, BadFile):
                return None
            pages = [node.data for node in checkpoint.node.path() if node.data is not None]
            assert checkpoint.state is not None and checkpoint.tail is not None  # it has just been brought
            return Image(checkpoint.length, checkpoint.state, [*pages, checkpoint.tail])

    def keep(
        self,
        tokens: Sequence[int],
        kind: str,
        state: Callable[[], np.ndarray],
        pages: Callable[[list[int]], Iterable[np.ndarray]],
        media: Sequence[Media] = (),
    ) -> bool:
        """Keep a checkpoint after all of `tokens`; False where there is no room, or no need because it is kept already.

        state() -> states uint8 `[state_bytes]`. pages(indices) -> those pages, uint8 `[page_bytes]` each: what is not kept yet, and
        at the end always the one that the last token is in. The arrays are the cache's from then on. What they raise goes to the
        caller, and nothing is kept.
        """
        ids = _array(tokens)
        with self._change():
            node = self._tree.extend(ids, media)
            checkpoint = Checkpoint(node, key_of(ids, node.depth * PAGE, len(ids), media), len(ids), kind)
            if (known := node.checkpoints.get(checkpoint.key)) is not None:
                known.kind = min(known.kind, kind, key=KINDS.index)
                self._tree.touch(known)
                return False
            self._tree.hang(checkpoint, HOST)
            checkpoint.pins, done = 1, False
            try:
                missing = [page for page in node.path() if page.data is None]
                self._store.make_room(len(missing) * self.page_bytes + self._store.bytes_of(checkpoint))
                states, fetched = state(), iter(pages([*(node.depth - 1 for node in missing), node.depth]))
                for page in missing:
                    self._store.put_page(page, next(fetched))
                self._store.put_state(checkpoint, states, next(fetched))
                done = True
            except NoRoom:
                self.counters.refused += 1
                return False
            finally:
                checkpoint.pins = 0
                if not done:
                    self._store.abandon(checkpoint)
            self.counters.stored += 1
            self._tree.touch(checkpoint)
            self._thin(checkpoint)
            if self._store.disk is not None:
                self._unwritten.append(checkpoint)
            if len(self._unwritten) > 2 * len(self._tree.checkpoints):  # where there is never an idle moment
                self._unwritten = [c for c in self._unwritten if c in self._tree.checkpoints and c.file is None]
            return True

    def seen(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> None:
        """Note that these tokens ran, for branch points to come."""
        with self._change():
            self._tree.extend(_array(tokens), media)

    def idle(self) -> bool:
        """Write one checkpoint to disk that is not there yet; whether there was one to write."""
        while self._unwritten:
            checkpoint = self._unwritten.pop()
            if checkpoint in self._tree.checkpoints and checkpoint.file is None:
                with self._change():
                    self._store.persist(checkpoint)
                return True
        return False

    def close(self) -> None:
        """Write all that is not on disk yet, the newest first."""
        while self.idle():
            pass

    def check(self) -> None:
        """AssertionError where the books disagree with what they are about; for tests."""
        self._store.check()

    @property
    def checkpoints(self) -> list[Mark]:
        """Lengths and kinds of all checkpoints, shortest first."""
        return sorted(Mark(c.length, c.kind) for c in self._tree.checkpoints)

    def _thin(self, newest: Checkpoint) -> None:
        way = self._tree.on_way(newest)
        gone = set(superfluous([Mark(c.length, c.kind) for c in way]))
        for checkpoint in way:
            if Mark(checkpoint.length, checkpoint.kind) in gone and not checkpoint.pins:
                self._store.drop(checkpoint)

    def _begin(self) -> None:
        folder, identity, disk_bytes, notice = self._place
        self._tree = Tree()
        self.counters.host_bytes = self.counters.disk_bytes = 0
        disk = None if folder is None else DiskTier(folder, identity, disk_bytes, notice, self.counters)
        self._store = Store(self._tree, self.page_bytes, self.state_bytes, self.host_bytes, disk, self.counters)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change that an exception of no one's making, a signal's for instance, may cut: then memory is begun afresh."""
        if self._changing:
            self._unwritten.clear()
            self._begin()
        self._changing = True
        try:
            yield
        except Exception:  # of callbacks: what was begun has been taken back
            self._changing = False
            raise
        self._changing = False


def _array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)
