"""Does it fit? Asked of shapes before a weight is read or a program compiled, and again when the compiler has said the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax

from ninfer_jax.engine.allocator import limit_hint
from ninfer_jax.programs import Programs
from ninfer_jax.programs.card import workspace_bytes
from ninfer_jax.programs.plan import resident_bytes

SMALLER = "take a smaller context or pool, a smaller KV format or fewer slots (`ninfer-jax plan` shows what would fit)"


def compiled_workspace(programs: Programs) -> int:
    """Bytes of the largest workspace of a program that serves; programs that do not tell count as nothing."""
    return max(programs.workspace(name, workspace_bytes(programs.compiled(name)) or 0) for name in programs.serving)


def free_bytes(device: jax.Device) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes that a process may still take on `device`; None where nothing tells. On a CPU what the machine has available or, where
    that is less, the process's control groups allow."""
    if device.platform == "cpu":
        return host_bytes()
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


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


def check_memory(programs: Programs, free: int | None, workspace: int = 0) -> None:
    """ValueError, with both byte counts, where weights, state, a snapshot and `workspace` are more than was `free` before any of
    them was there (`free_bytes`; None where nothing tells)."""
    need = resident_bytes(programs) + workspace
    if free is None or need <= free:
        return
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    hint = limit_hint(need, stats["bytes_limit"]) if stats else ""
    raise ValueError(
        f"memory: {need:,} bytes are needed for weights, pages and states{' and workspace' if workspace else ''}, {free:,} are "
        f"free on {device.device_kind}; {hint or SMALLER}"
    )
