"""The replica that a request goes to, by what it belongs to and what the replicas report. Pure Python: nothing of Ray in here.

A conversation has a home, by rendezvous hashing (Thaler and Ravishankar 1998): each replica draws a number from the conversation's
name and its own, the highest is home. So all routers agree without talking, and a replica that comes or goes moves only the
conversations that it wins or had. Home is where the conversation's prefix is cached; being there is worth a short wait, not a
long one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

WAITING_AT_HOME = 3  # requests that wait there, from which on a conversation looks elsewhere


@dataclass(frozen=True)
class Replica:
    """A replica as a router sees it. slots: requests that it computes at a time; requests: all that it has; prefixes: digests
    (`affinity.Link`) of the prompts that it has answered, the latest ones."""

    name: str
    slots: int = 1
    requests: int = 0
    prefixes: Collection[str] = ()

    @property
    def waiting(self) -> int:
        """Requests beyond its slots."""
        return max(0, self.requests - self.slots)

    def depth(self, chain: Sequence[tuple[str, int]]) -> int:
        """Bytes of the prompt, from its beginning, that this replica has answered before; chain: (digest, bytes) of each link."""
        total = 0
        for digest, size in chain:
            if digest not in self.prefixes:
                break
            total += size
        return total


def by_home(key: str, names: Iterable[str]) -> list[str]:
    """The names, the home of `key` first, then where it would be at home without those before."""
    return sorted(names, key=lambda name: (_draw(key, name), name), reverse=True)


def ranked(key: str | None, chain: Sequence[tuple[str, int]], replicas: Sequence[Replica]) -> list[str]:
    """Names of all replicas, in the order in which a request should try them.

    Home first unless `WAITING_AT_HOME` requests wait there; then the replicas with fewer requests than home has, the one with the
    deepest prefix first and of equals the least loaded; then home; then the rest. A request without a key goes to the least loaded.
    """
    known = {replica.name: replica for replica in replicas}
    order = by_home(key or "", known)
    place = {name: at for at, name in enumerate(order)}
    if not known:
        return []
    if key is None:
        return sorted(order, key=lambda name: (_load(known[name]), place[name]))
    home = known[order[0]]
    if home.waiting < WAITING_AT_HOME:
        return [home.name, *sorted(order[1:], key=lambda name: _elsewhere(known[name], chain, place[name]))]
    better = [name for name in order[1:] if _load(known[name]) < _load(home)]
    better.sort(key=lambda name: _elsewhere(known[name], chain, place[name]))
    rest = [name for name in order[1:] if name not in better]
    return [*better, home.name, *sorted(rest, key=lambda name: (_load(known[name]), place[name]))]


def _elsewhere(replica: Replica, chain: Sequence[tuple[str, int]], place: int) -> tuple[int, float, int]:
    return -replica.depth(chain), _load(replica), place


def _load(replica: Replica) -> float:
    """Requests a slot, so that a large replica and a small one compare."""
    return replica.requests / max(1, replica.slots)


def _draw(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{len(key)} {key} {name}".encode("utf-8", "replace"), digest_size=8).digest()
