"""Radix tree over pages of token ids, with checkpoints hung where the recurrent states of a prefix are known.

A page's data is worth keeping for one reason: a checkpoint at or below it, since keys and values cannot be used without the
recurrent states at their end. So every node counts the checkpoints at or below it, one count a tier, and a count that falls to
zero frees the data. The node itself stays for a while, as a page that was seen: where a prompt matches further than any
checkpoint reaches, others have been there before, and a checkpoint at that branch point will serve the next.

A page stands for 64 tokens and the one after them, which the MTP layer's entry of its last token is made of. So the page that ends
where a checkpoint does, whose next token nobody knows, is the checkpoint's own: its tail, as is one that is not full.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ninfer_jax.config import PAGE

HOST, DISK = 0, 1  # tiers
TIERS = ("host", "disk")
MAX_SEEN = 65_536  # pages without data that are remembered: 16 MiB of token ids
_IDS = 4 * PAGE  # bytes of a page's own ids in a key


class Media(NamedTuple):
    """Something that stands behind placeholder tokens `start` to `stop` of a prompt; digest: of what it is."""

    start: int
    stop: int
    digest: bytes


def key_of(tokens: np.ndarray, start: int, stop: int, media: Sequence[Media] = ()) -> bytes:
    """The identity of tokens `start` to `stop`, of int32 `[tokens]`: equal keys mean equal ids and equal media at equal places."""
    inside = [f"{m.start} {m.stop} {m.digest.hex()} ".encode() for m in media if m.start < stop and m.stop > start]
    return tokens[start:stop].astype("<i4").tobytes() + b"".join(inside)


@dataclass(eq=False, slots=True)
class Checkpoint:
    """Recurrent and convolution states after exactly `length` tokens, which end 1 to 64 tokens into the page after `node`.

    key: of those last tokens. kind: why it was taken (`policy`). used: a clock, larger is later. pins: those who rely on it now.
    state, tail: uint8 arrays in host memory, None if not there; tail is the page that they end in. file: on disk, or None.
    """

    node: Node
    key: bytes
    length: int
    kind: str
    used: int = 0
    pins: int = 0
    state: np.ndarray | None = None
    tail: np.ndarray | None = None
    file: Any = None

    def within(self, tier: int) -> bool:
        return (self.state if tier == HOST else self.file) is not None


@dataclass(eq=False, slots=True)
class Node:
    """A page: its key, of 65 tokens, the digest of all keys down to it, and what is known of it.

    counts: checkpoints at or below, `[tiers]`. data: uint8 array in host memory, or None. file, index: where on disk, or None.
    """

    parent: Node | None
    key: bytes
    depth: int  # pages down to this one, itself included
    digest: bytes
    children: dict[bytes, Node] = field(default_factory=dict)
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0, 0])
    data: np.ndarray | None = None
    file: Any = None
    index: int = 0

    def path(self) -> list[Node]:
        """From the first page to this one."""
        up, node = [], self
        while node.parent is not None:
            up.append(node)
            node = node.parent
        return up[::-1]


class Match(NamedTuple):
    """checkpoint: the deepest one on the prompt's way, or None. pages: of the prompt whose 64 tokens were seen before, checkpoint
    or not."""

    checkpoint: Checkpoint | None
    pages: int


def chain(digest: bytes, key: bytes) -> bytes:
    """Digest of a page and all before it, from that of those before it."""
    return hashlib.blake2b(digest + key, digest_size=16).digest()


class Tree:
    """All prefixes that are known. Not thread-safe."""

    def __init__(self, max_seen: int = MAX_SEEN):
        self.root = Node(None, b"", 0, bytes(16))
        self.checkpoints: set[Checkpoint] = set()
        self.pages = 0  # nodes, the root not counted
        self._max_seen = max_seen
        self._seen = 0  # nodes without a checkpoint at or below
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # those of them without children, longest unused first
        self._clock = itertools.count(1)

    def match(self, tokens: np.ndarray, media: Sequence[Media] = (), most: int | None = None) -> Match:
        """The longest way that the pages of int32 `[tokens]` go, and the deepest checkpoint on it of at most `most` tokens."""
        most = len(tokens) if most is None else min(most, len(tokens))
        node, found = self.root, None
        while True:
            for checkpoint in node.checkpoints.values():
                length = checkpoint.length
                deeper = length <= most and (found is None or length > found.length)
                if deeper and checkpoint.key == key_of(tokens, node.depth * PAGE, length, media):
                    found = checkpoint
            start = node.depth * PAGE
            child = node.children.get(key_of(tokens, start, start + PAGE + 1, media)) if start + PAGE < len(tokens) else None
            if child is None:
                last = key_of(tokens, start, start + PAGE, media)
                seen = start + PAGE <= len(tokens) and any(key[:_IDS] + key[_IDS + 4 :] == last for key in node.children)
                return Match(found, node.depth + seen)
            node = child
            if node in self._leaves:
                self._leaves.move_to_end(node)

    def extend(self, tokens: np.ndarray, media: Sequence[Media] = ()) -> Node:
        """The node of the last whole page of `tokens` that another token follows; pages that were not known are added."""
        node = self.root
        for start in range(0, len(tokens) - PAGE, PAGE):
            node = self.child(node, key_of(tokens, start, start + PAGE + 1, media))
        self.forget()
        return node

    def child(self, node: Node, key: bytes) -> Node:
        """The page `key` after `node`, added if it is not known."""
        if (known := node.children.get(key)) is not None:
            return known
        child = node.children[key] = Node(node, key, node.depth + 1, chain(node.digest, key))
        self._leaves.pop(node, None)
        self._leaves[child] = None
        self._seen += 1
        self.pages += 1
        return child

    def forget(self) -> None:
        """Drop the pages that were merely seen and have not been for the longest time, where there are too many of them."""
        while self._seen > self._max_seen:
            leaf, _ = self._leaves.popitem(last=False)
            parent = leaf.parent
            assert parent is not None  # the root is none of them
            del parent.children[leaf.key]
            self._seen -= 1
            self.pages -= 1
            if parent.parent is not None and not parent.children and not any(parent.counts):
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)

    def hang(self, checkpoint: Checkpoint, tier: int) -> None:
        """Book `checkpoint` in `tier`; all pages down to it are needed there from now on."""
        checkpoint.node.checkpoints[checkpoint.key] = checkpoint
        self.checkpoints.add(checkpoint)
        for node in self._up(checkpoint.node):
            if not any(node.counts):
                self._seen -= 1
                self._leaves.pop(node, None)
            node.counts[tier] += 1

    def release(self, checkpoint: Checkpoint, tier: int, elsewhere: bool) -> list[Node]:
        """Take `checkpoint` out of `tier`; the pages that nothing needs there any more. elsewhere: it stays in the other tier."""
        if not elsewhere:
            del checkpoint.node.checkpoints[checkpoint.key]
            self.checkpoints.discard(checkpoint)
        free = []
        for node in self._up(checkpoint.node):
            node.counts[tier] -= 1
            if not node.counts[tier]:
                free.append(node)
            if not any(node.counts):
                self._seen += 1
                if not node.children:
                    self._leaves[node] = None
        return free

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note that `checkpoint` was used. Those before it on its way count as used a little earlier, so that what many share
        outlives what one alone had."""
        for node in checkpoint.node.path():
            for other in node.checkpoints.values():
                if other.length < checkpoint.length and node is not checkpoint.node:
                    other.used = next(self._clock)
        checkpoint.used = next(self._clock)

    def on_way(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Checkpoints on the way to `checkpoint`, itself included, shortest first."""
        path = [self.root, *checkpoint.node.path()]
        onward = [*(node.key for node in path[1:]), checkpoint.key]
        way = [c for node, after in zip(path, onward, strict=True) for c in node.checkpoints.values() if after.startswith(c.key)]
        return sorted(way, key=lambda c: c.length)

    def is_frontier(self, checkpoint: Checkpoint) -> bool:
        """Whether no other checkpoint continues it past its page, nor is longer in it: the newest of its conversation."""
        node = checkpoint.node
        here = node.checkpoints.values()
        below = node.parent is not None and node.counts != [sum(c.within(tier) for c in here) for tier in (HOST, DISK)]
        if node.parent is None:
            below = any(any(child.counts) for child in node.children.values())
        return not below and all(c.length <= checkpoint.length for c in here)

    def check(self, nodes: list[Node]) -> None:
        """AssertionError where the books of pages that were merely seen disagree with `nodes`, all there are."""
        seen = [node for node in nodes if not any(node.counts)]
        assert self.pages == len(nodes) and self._seen == len(seen)
        assert set(self._leaves) == {node for node in seen if not node.children}

    def _up(self, node: Node) -> Iterator[Node]:
        at = node
        while at.parent is not None:
            yield at
            at = at.parent
