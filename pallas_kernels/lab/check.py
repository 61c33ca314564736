"""Numbers against the reference: on a CPU small twins interpreted, and CPU kernels compiled; on a GPU its cases compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lab import registry


@dataclasses.dataclass(frozen=True)
class Result:
    """`error` is the relative L2 error against the reference; `mode` is interpreted or compiled."""

    op: str
    case: str
    mode: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"passed": self.passed}


def on_gpu() -> bool:
    """Whether kernels can be run as they are compiled."""
    return jax.default_backend() == "gpu"


def cases(ops: list[str] | None = None) -> list[registry.Case]:
    """Cases to check on this machine: the 27B's on a GPU, their small twins elsewhere, and those of CPU kernels."""
    return registry.cases(ops, small=not on_gpu(), on_cpu=not on_gpu())


def run(case: registry.Case, seed: int = 0, config: Any = None) -> Result:
    """A case has `sample(key)` for arguments, `reference(*arguments)` and `allowed_error` for this; `config` as `tune`."""
    arguments = case.sample(jax.random.key(seed))
    interpret = not on_gpu() and not hasattr(case, "on_cpu")
    chosen = {} if config is None else {"config": config}
    got = case.call(*arguments, interpret=interpret, **chosen)
    want = case.reference(*arguments)
    errors = jax.tree.map(relative_error, got, want)
    return Result(case.op, case.name, "interpreted" if interpret else "compiled", max(jax.tree.leaves(errors)), case.allowed_error)


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """|got - want| / |want|, both norms over all numbers."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
