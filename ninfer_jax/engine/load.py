"""The engine at one moment, for a dashboard."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ninfer_jax.config import PAGE
from ninfer_jax.engine.runner import Runner


@dataclass(frozen=True)
class Load:
    """slots: of each a mapping with `state` ("free", "prefill", "decode") and `tokens`, its length. waiting: requests without one.
    pages_used, pages_total: of the pool. cached_tokens: prompt tokens that needed no prefill since the start, by where they came
    from. numbers: what else has been counted since then, by Prometheus name without a prefix.
    """

    slots: list[dict[str, Any]] = field(default_factory=list)
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def load_of(runner: Runner, **more: float) -> Load:
    """The load of a runner; more: further `numbers`. For the thread that owns it."""
    slots: list[dict[str, Any]] = [{"state": "free", "tokens": 0} for _ in range(runner.pool.programs.shape.slots)]
    live = runner.live
    for sequence in live:
        if sequence.lease is not None:
            state = "decode" if sequence.begun else "prefill"
            slots[sequence.lease.slot] = {"state": state, "tokens": sequence.prefilled + len(sequence.tokens)}
    counts = dataclasses.asdict(runner.counts)
    cached = {"slot": counts.pop("cached")}
    numbers: dict[str, float] = {f"engine_{name}": value for name, value in {**counts, **more}.items()}
    if (prefixes := runner.prefixes.counters) is not None:
        cached = {"host": prefixes.cached_host, "disk": prefixes.cached_disk}
        numbers |= {f"prefix_{name}": value for name, value in dataclasses.asdict(prefixes).items()}
    return Load(
        slots,
        sum(s.lease is None for s in live),
        (runner.pool_tokens - runner.free_tokens) // PAGE,
        runner.pool_tokens // PAGE,
        cached,
        numbers,
    )
