"""Bytes of main memory that a process may still take: what Linux has available, and what control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def host_bytes() -> int | None:
    """Bytes of main memory that a process may still take; None where nothing tells."""
    return min((n for n in (available_bytes(), *group_bytes()) if n is not None), default=None)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that Linux could give out without swapping; None where it does not tell."""
    return _counts(root / "proc/meminfo").get("MemAvailable:")


def group_bytes(root: Path = Path("/")) -> Iterator[int]:
    """Bytes that each control group around this process still allows, of those that have a limit (version 1 or 2); the cache of
    files that it is charged with is given back on demand, and counts as free."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A container may see its own group as the root, under whatever name it has outside.
        folder = mount / place.strip().lstrip("/")
        for group in {mount, *(p for p in (folder, *folder.parents) if mount in p.parents)}:
            most, now = ("".join(_lines(group / name)) for name in (limit, used))
            if most.isdecimal() and now.isdecimal():
                held = _counts(group / "memory.stat")
                cache = sum(held.get(name, 0) for name in ("active_file", "inactive_file"))
                yield max(0, int(most) - int(now) + cache)


def _counts(file: Path) -> dict[str, int]:
    """`name number [kB]` a line, in bytes."""
    words = (line.split() for line in _lines(file))
    return {w[0]: int(w[1]) * (1024 if w[2:] == ["kB"] else 1) for w in words if len(w) > 1 and w[1].isdecimal()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
