"""Does it fit? Asked of shapes before a weight is read or a program compiled, and again when the compiler has said the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ninfer_jax.engine.allocator import limit_hint
from ninfer_jax.planning.host_memory import host_bytes
from ninfer_jax.planning.nearest import DoesNotFit
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


def check_memory(
    programs: Programs, free: int | None, workspace: int = 0, smaller: Callable[[int], list[dict[str, Any]]] | None = None
) -> None:
    """ValueError, with both byte counts, where weights, state, a snapshot and `workspace` are more than was `free` before any of
    them was there (`free_bytes`; None where nothing tells). smaller: given the bytes that lack, changes that make it fit."""
    need = resident_bytes(programs) + workspace
    if free is None or need <= free:
        return
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    hint = limit_hint(need, stats["bytes_limit"]) if stats else ""
    changes = [] if hint or smaller is None else smaller(workspace)
    fitting = "; ".join(", ".join(f"{name} {value}" for name, value in change.items()) for change in changes)
    raise DoesNotFit(
        f"memory: {need:,} bytes are needed for weights, pages and states{' and workspace' if workspace else ''}, {free:,} are "
        f"free on {device.device_kind}; {hint or (f'what fits: {fitting}' if fitting else SMALLER)}",
        changes,
    )
