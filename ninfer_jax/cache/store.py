"""Bytes of pages and states in host memory under a budget, and on disk behind it: which checkpoint is where, and who goes."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from ninfer_jax.cache.container import BadFile
from ninfer_jax.cache.counters import Counters
from ninfer_jax.cache.disk import PAGES, STATE, DiskTier, File
from ninfer_jax.cache.policy import KINDS, LIVE, eviction_order
from ninfer_jax.cache.tree import DISK, HOST, Checkpoint, Node, Tree, chain
from ninfer_jax.config import PAGE

RUN = 64  # pages of a file, at most


class NoRoom(Exception):
    """A budget has not enough room, even without all that may go."""


class Store:
    """The places of the data of `tree`. Never holds more than `budget` bytes in host memory, nor than the disk tier's own on disk.

    page_bytes, state_bytes: sizes of a page and of a state; a checkpoint holds its last page too.
    """

    def __init__(self, tree: Tree, page_bytes: int, state_bytes: int, budget: int, disk: DiskTier | None, counters: Counters):
        self.tree, self.page_bytes, self.state_bytes, self.budget = tree, page_bytes, state_bytes, budget
        self.disk, self.counters, self.used = disk, counters, 0
        if disk is not None:
            self._attach(disk)

    def bytes_of(self, checkpoint: Checkpoint) -> int:
        """Bytes that are the checkpoint's own, without the pages before its last."""
        return self.state_bytes + self.page_bytes

    def make_room(self, size: int) -> None:
        """Let `size` more bytes fit into host memory; NoRoom where they cannot, and then nothing has gone."""
        if self.used + size <= self.budget:
            return
        if size + self._held(HOST) > self.budget:
            raise NoRoom
        for victim in self._order(HOST):
            if self.used + size <= self.budget:
                return
            self.leave_host(victim)
        if self.used + size > self.budget:
            raise NoRoom

    def put_page(self, node: Node, data: np.ndarray) -> None:
        """Keep a page's bytes in host memory, for which there is room."""
        node.data = data
        self._count(data.nbytes)

    def put_state(self, checkpoint: Checkpoint, state: np.ndarray, tail: np.ndarray) -> None:
        """Keep a checkpoint's own bytes in host memory, for which there is room."""
        checkpoint.state, checkpoint.tail = state, tail
        self._count(state.nbytes + tail.nbytes)

    def abandon(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint back that was hung in host memory, however far it was filled."""
        self._free_host(checkpoint, elsewhere=False)

    def leave_host(self, checkpoint: Checkpoint) -> None:
        """Free its host memory. It stays on disk where there is a disk tier that takes it, else it is gone."""
        elsewhere = self.persist(checkpoint)
        if elsewhere:
            self.counters.spilled += 1
        else:
            self.counters.evicted += 1
        self._free_host(checkpoint, elsewhere)

    def persist(self, checkpoint: Checkpoint) -> bool:
        """Write to disk what is not there yet of a checkpoint in host memory and of its pages; whether it is there now."""
        if checkpoint.file is not None:
            return True
        disk, state, tail = self.disk, checkpoint.state, checkpoint.tail
        if disk is None or not disk.writable or state is None or tail is None:
            return False
        tree, path, pinned = self.tree, checkpoint.node.path(), checkpoint.pins
        tree.hang(checkpoint, DISK)  # its pages are needed on disk from here on
        checkpoint.pins += 1
        try:
            missing = [node for node in path if node.file is None]
            for run in _runs(missing):
                self._write_run(disk, run)
            node = checkpoint.node
            fields = {
                "after": node.digest.hex(),
                "key": base64.b64encode(checkpoint.key).decode(),
                "length": checkpoint.length,
                "kind": checkpoint.kind,
            }
            name = f"{chain(node.digest, checkpoint.key).hex()}-{checkpoint.length}.{STATE}"
            checkpoint.file = self._write(disk, name, STATE, fields, [state, tail])
            checkpoint.file.refs = 1
        except NoRoom:
            self._free_disk(checkpoint, elsewhere=True)
            return False
        finally:
            checkpoint.pins = pinned
        return True

    def bring(self, checkpoint: Checkpoint) -> None:
        """Have a checkpoint and all its pages in host memory. NoRoom, or BadFile where the disk does not give back what was
        written: then what is bad and all that needs it is gone."""
        if checkpoint.state is not None:
            return
        disk, file, tree = self.disk, checkpoint.file, self.tree
        assert disk is not None and file is not None  # it is in one of the tiers
        tree.hang(checkpoint, HOST)
        checkpoint.pins += 1
        at, done = file, False
        try:
            missing = [node for node in checkpoint.node.path() if node.data is None]
            self.make_room(len(missing) * self.page_bytes + self.bytes_of(checkpoint))
            for node in missing:
                at = node.file
                self.put_page(node, disk.read(at, node.index))
            at = file
            self.put_state(checkpoint, disk.read(file, 0), disk.read(file, 1))
            disk.touch(file)
            done = True
        except BadFile as error:
            disk.bad(at.path, error)
            self.drop_file(at)
            raise
        finally:
            checkpoint.pins -= 1
            if not done:
                self._free_host(checkpoint, elsewhere=True)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of all tiers."""
        on_disk = checkpoint.file is not None
        if checkpoint.state is not None:
            self._free_host(checkpoint, elsewhere=on_disk)
        if on_disk:
            self._free_disk(checkpoint, elsewhere=False)
        self.counters.evicted += 1

    def drop_file(self, file: File) -> None:
        """Take all that lies in a bad file, and all that needs it, off the disk."""
        lost = [c for c in self.tree.checkpoints if c.file is not None]
        for checkpoint in lost:
            if checkpoint.file is file or any(node.file is file for node in checkpoint.node.path()):
                gone = checkpoint.state is None
                self._free_disk(checkpoint, elsewhere=not gone)
                self.counters.evicted += gone

    def trim_disk(self, size: int = 0) -> None:
        """Let `size` more bytes fit on disk. NoRoom where they cannot."""
        disk = self.disk
        assert disk is not None  # only then is anything there
        if disk.used + size <= disk.budget:
            return
        for victim in self._order(DISK):
            if disk.used + size <= disk.budget:
                return
            gone = victim.state is None
            self._free_disk(victim, elsewhere=not gone)
            self.counters.evicted += gone
        if disk.used + size > disk.budget:
            raise NoRoom

    def check(self) -> None:
        """AssertionError where counts, bytes or places are not what a walk over everything finds."""
        counted: dict[Node, list[int]] = defaultdict(lambda: [0, 0])
        for checkpoint in self.tree.checkpoints:
            assert checkpoint.node.checkpoints[checkpoint.key] is checkpoint and any(map(checkpoint.within, (HOST, DISK)))
            for node in checkpoint.node.path():
                for tier in (HOST, DISK):
                    counted[node][tier] += checkpoint.within(tier)
        nodes, waiting, refs = [], list(self.tree.root.children.values()), defaultdict(int)
        while waiting:
            nodes.append(waiting.pop())
            waiting.extend(nodes[-1].children.values())
        for node in nodes:
            assert node.counts == counted[node], (node.counts, counted[node])
            assert (node.data is not None) == (node.counts[HOST] > 0)
            assert (node.file is not None) == (node.counts[DISK] > 0)
            if node.file is not None:
                refs[node.file] += 1
        states = [c for c in self.tree.checkpoints if c.state is not None]
        held = sum(self.bytes_of(c) for c in states) + self.page_bytes * sum(node.data is not None for node in nodes)
        assert self.used == held == self.counters.host_bytes <= self.budget
        refs |= {c.file: 1 for c in self.tree.checkpoints if c.file is not None}
        assert all(file.refs == count for file, count in refs.items())
        if self.disk is not None:
            there = sum(file.path.stat().st_size for file in refs)
            assert self.disk.used == there == sum(file.contents.size for file in refs) <= self.disk.budget
        self.tree.check(nodes)

    def _write_run(self, disk: DiskTier, run: list[Node]) -> None:
        parent = run[0].parent
        assert parent is not None  # only the root has none
        pieces = [node.data for node in run if node.data is not None]
        fields = {"after": parent.digest.hex(), "keys": [base64.b64encode(node.key).decode() for node in run]}
        file = self._write(disk, f"{run[-1].digest.hex()}-{len(run)}.{PAGES}", PAGES, fields, pieces)
        file.refs = len(run)
        for index, node in enumerate(run):
            node.file, node.index = file, index

    def _write(self, disk: DiskTier, name: str, kind: str, fields: dict, pieces: list[np.ndarray]) -> File:
        head = disk.head(kind, fields, pieces)
        self.trim_disk(len(head) + sum(piece.nbytes for piece in pieces))
        file = disk.write(name, kind, fields, head, pieces)
        if file is None:
            raise NoRoom
        return file

    def _free_host(self, checkpoint: Checkpoint, elsewhere: bool) -> None:
        for array in (checkpoint.state, checkpoint.tail):
            self._count(0 if array is None else -array.nbytes)
        checkpoint.state = checkpoint.tail = None
        for node in self.tree.release(checkpoint, HOST, elsewhere):
            if node.data is not None:
                self._count(-node.data.nbytes)
                node.data = None

    def _free_disk(self, checkpoint: Checkpoint, elsewhere: bool) -> None:
        disk = self.disk
        assert disk is not None  # only then is anything there
        if checkpoint.file is not None:
            disk.release(checkpoint.file)
            checkpoint.file = None
        for node in self.tree.release(checkpoint, DISK, elsewhere):
            if node.file is not None:
                disk.release(node.file)
                node.file = None

    def _order(self, tier: int) -> list[Checkpoint]:
        there = [c for c in self.tree.checkpoints if c.within(tier) and not c.pins]
        return eviction_order(there, [c for c in self.tree.checkpoints if self.tree.is_frontier(c)], LIVE)

    def _held(self, tier: int) -> int:
        """Bytes of a tier that pinned checkpoints need."""
        pinned = [c for c in self.tree.checkpoints if c.pins and c.within(tier)]
        nodes = {node for c in self.tree.checkpoints if c.pins for node in c.node.path() if node.data is not None}
        return sum(self.bytes_of(c) for c in pinned) + self.page_bytes * len(nodes)

    def _count(self, size: int) -> None:
        self.used += size
        self.counters.host_bytes = self.used

    def _attach(self, disk: DiskTier) -> None:
        """Hang what an earlier start has left: runs of pages where they continue what is known, then the states at their ends."""
        tree, files = self.tree, disk.scan()
        runs, states = defaultdict(list), []
        for file in files:
            try:
                fields, sizes = file.contents.fields, [size for _, size, _ in file.contents.pieces]
                if file.contents.kind == PAGES:
                    keys = [base64.b64decode(key) for key in fields["keys"]]
                    if sizes != [self.page_bytes] * len(keys) or not keys or any(len(key) < 4 * (PAGE + 1) for key in keys):
                        raise ValueError
                    runs[bytes.fromhex(fields["after"])].append((file, keys))
                elif file.contents.kind == STATE:
                    length, kind, key = int(fields["length"]), fields["kind"], base64.b64decode(fields["key"])
                    own = [self.state_bytes, self.page_bytes]
                    if sizes != own or kind not in KINDS or length < 1 or len(key) < ((length - 1) % PAGE + 1) * 4:
                        raise ValueError
                    states.append((file, bytes.fromhex(fields["after"]), key, length, kind))
                else:
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                disk.bad(file.path, BadFile("is damaged"))
        known, waiting = {tree.root.digest: tree.root}, [tree.root]
        while waiting:
            for file, keys in runs.pop(waiting.pop().digest, ()):
                node = known[bytes.fromhex(file.contents.fields["after"])]
                for index, key in enumerate(keys):
                    node = tree.child(node, key)
                    if node.file is None:
                        node.file, node.index, file.refs = file, index, file.refs + 1
                    if node.digest not in known:
                        known[node.digest] = node
                        waiting.append(node)
        for file, after, key, length, kind in states:
            node = known.get(after)
            if node is not None and (length - 1) // PAGE == node.depth and key not in node.checkpoints:
                checkpoint = Checkpoint(node, key, length, kind, file=file)
                file.refs = 1
                tree.hang(checkpoint, DISK)
                tree.touch(checkpoint)
        self._remove_useless(disk, files)
        tree.forget()
        self.trim_disk()

    def _remove_useless(self, disk: DiskTier, files: Iterable[File]) -> None:
        """Pages that no state needs, and what continues pages that are gone."""
        nodes = list(self.tree.root.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            if node.file is not None and not node.counts[DISK]:
                node.file.refs -= 1
                node.file = None
        for file in files:
            if file.refs <= 0:
                disk.drop(file)


def _runs(nodes: list[Node]) -> list[list[Node]]:
    """`nodes`, from first to last, in pieces of at most `RUN` that follow one another without a gap."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and node.parent is runs[-1][-1] and len(runs[-1]) < RUN:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs
