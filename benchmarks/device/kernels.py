"""The lab's cases on the card that is here: their numbers against the references, and their times beside a copy's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from device.report import Stage
from pallas_kernels.lab import bench, check, registry

ROOMY = 64 * 10**9  # bytes of a card on which several cases and their references fit side by side

TINY_OPS = ("kv_append", "delta_fold", "head")


def interleaved(found: list[registry.Case]) -> list[registry.Case]:
    """The first case of every op, then the second ones, so that a cut takes variants and not ops."""
    by_op: dict[str, list[registry.Case]] = {}
    for case in found:
        by_op.setdefault(case.op, []).append(case)
    return [case for row in itertools.zip_longest(*by_op.values()) for case in row if case is not None]


def numbers(stage: Stage, tiny: bool, memory: int | None) -> None:
    """Relative L2 errors against the references; real shapes compiled on a GPU, small twins interpreted on a CPU."""
    if tiny:
        stage.note("A small twin of the ops that a CPU interprets in a moment.")
    chosen = interleaved(registry.cases(small=not check.on_gpu()))
    if tiny:  # of each of these the one with the least work
        least = {c.op: c for c in sorted(chosen, key=lambda c: c.multiply_adds, reverse=True)}
        for op in [op for op in least if op not in TINY_OPS]:
            stage.leave_out(op, f"not in miniature: `python -m pallas_kernels.lab check {op}`, or a GPU")
        chosen = [least[op] for op in TINY_OPS if op in least]
    threads = 4 if memory and memory > ROOMY else 1

    def one(case: registry.Case) -> None:
        stage.run(f"{case.op}/{case.name}", functools.partial(_checked, case), kind=case.op, guess=3)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, chosen))


def _checked(case: registry.Case) -> Mapping[str, Any]:
    result = check.run(case)
    found: dict[str, Any] = {"mode": result.mode, "relative_error": result.error, "allowed": result.allowed}
    if not result.passed:
        found["failed"] = f"relative error {result.error:.2e}, allowed {result.allowed:.0e}"
    return found


def times(stage: Stage, tiny: bool) -> float | None:
    """Times of kernels and the copy speed in bytes/s, None where it could not be had."""
    size = 2**24 if tiny else 2**30
    copied = stage.run("copy", lambda: {"gb_s": bench.copy_bytes_per_second(size) / 1e9, "bytes": size}, kind="copy", guess=3)
    if copied is None:
        return None
    speed = 1e9 * copied["gb_s"]
    if not check.on_gpu():
        stage.note("Not on a GPU: times of plain XLA operations on this CPU, which merges the copies; only the clock is tried.")
        stage.run("add/xla", functools.partial(_timed, Add(), speed))
        for op in dict.fromkeys(case.op for case in registry.cases()):
            stage.leave_out(f"{op}: times", "GPU only")
        return speed
    for case in interleaved(registry.cases()):
        stage.run(f"{case.op}/{case.name}", functools.partial(_timed, case, speed), kind=case.op, guess=4)
    return speed


def _timed(case: registry.Case, speed: float) -> Mapping[str, Any]:
    timing = bench.run(case, speed).json()
    fields = ("median_us", "spread", "gb_s", "fraction", "calls", "copies")
    return {"median_us": timing["median_us"], "ideal_bytes": case.ideal_bytes} | {f: timing[f] for f in fields}


@dataclasses.dataclass(frozen=True)
class Add:
    """y = x + one over 16 MiB, as a case of the lab: what can be timed where kernels cannot."""

    op: str = "add"
    name: str = "xla"
    elements: int = 2**22

    @property
    def ideal_bytes(self) -> int:
        return 8 * self.elements

    def sample(self, key: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(key, (self.elements,)), jnp.ones(())]

    @property
    def call(self) -> Callable[..., jax.Array]:
        return lambda x, one: x + one
