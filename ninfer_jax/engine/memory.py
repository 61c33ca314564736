"""Does it fit? Asked of shapes before a weight is read or a program compiled, and again when the compiler has said the rest."""

from __future__ import annotations

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
    """Bytes that a process may still take on `device`; None where nothing tells."""
    if device.platform == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


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
