"""Does it fit? Asked when the programs are ready and before a weight is read."""

from __future__ import annotations

from pathlib import Path

import jax

from ninfer_jax.engine.allocator import limit_hint
from ninfer_jax.programs import Programs
from ninfer_jax.programs.plan import SERVING, nbytes

SMALLER = "take a smaller context or pool, a smaller KV format or fewer slots (`ninfer-jax plan` shows what would fit)"


def needed_bytes(programs: Programs) -> int:
    """Weights, state, and the largest workspace of a program, in bytes."""
    _, (parameters, state), _ = programs.source("decode_round")
    resident = sum(nbytes(x) for x in jax.tree.leaves((parameters, state)))
    memory = (programs.compiled(name).memory_analysis() for name in SERVING)
    # A loaded executable may not tell; then the plan it was compiled by is what was checked.
    return resident + max((m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in memory if m), default=0)


def free_bytes(device: jax.Device) -> int | None:
    """What a process may still take on `device`; None where nothing tells."""
    if device.platform == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


def check_memory(programs: Programs) -> None:
    """ValueError, with both byte counts, where the engine would not fit in what is free."""
    device = jax.devices()[0]
    need, free = needed_bytes(programs), free_bytes(device)
    if free is not None and need > free:
        stats = device.memory_stats() if device.platform != "cpu" else None
        hint = limit_hint(need, stats["bytes_limit"]) if stats else ""
        raise ValueError(
            f"memory: {need:,} bytes are needed for weights, pages, states and workspace, {free:,} are free on "
            f"{device.device_kind}; {hint or SMALLER}"
        )
