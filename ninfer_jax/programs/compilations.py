"""Counts what XLA compiles in this process, so that "no compilation in service" can be shown instead of promised."""

from __future__ import annotations

import functools

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def compilations() -> int:
    """Programs compiled since this was first asked, of any size and by anyone in the process."""
    _start_counting()
    return _count


@functools.cache
def _start_counting() -> None:
    # Not at import: whoever only imports the package gets no listener in their process.
    jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _EVENT:
        _count += 1
