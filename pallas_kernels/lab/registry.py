"""Every kernel case the lab knows, and what a case has to offer."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

# Modules with CASES (the 27B's shapes), SMALL (twins that a CPU can interpret) and, where an op has one, cases of its CPU
# kernel: ON_CPU (`lab.on_cpu`).
MODULES = (
    "pallas_kernels.matmul.cases",
    "pallas_kernels.matmul.cpu_cases",
    "pallas_kernels.kv_append.cases",
    "pallas_kernels.decode_attention.cases",
    "pallas_kernels.delta_decode.cases",
    "pallas_kernels.delta_fold.cases",
    "pallas_kernels.delta_prefill.cases",
    "pallas_kernels.prefill_attention.cases",
    "pallas_kernels.draw.cases",
    "pallas_kernels.rotary.cases",
)
# Op -> its module and the package without which it is not there.
OPTIONAL = {"quantised_matmul_triton": ("pallas_kernels.matmul.triton_cases", "jax_triton")}
_EXTRA = "Python 3.12 or newer and the extra: pip install 'ninfer-jax[triton]'"


class Case(Protocol):
    """One call of a kernel with fixed shapes.

    A case may also have `donate` (positions of arguments updated in place), `other_trips()` (passes of the loops without
    tensor-core instructions, by address), and `fill(key)` for `bench`: arguments where those of `sample` take too much
    memory. What is marked as such below may be missing.
    """

    op: str
    name: str
    ideal_bytes: int  # what has to be read and written, each byte once
    weight_bytes: int  # the bytes `thread_instructions_per_byte` is counted against
    multiply_adds: int
    allowed_error: float  # relative, of `check`
    key: str  # of `tune`, may be missing: what `tuned` knows the shape by

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        raise NotImplementedError

    def call(self, *arguments: Any, interpret: bool = False, config: Any = None) -> Any:
        """The kernel's result; `config` only where there are `configs`."""
        raise NotImplementedError

    def sample(self, key: Any) -> list[Any]:
        """Random arguments for `call`."""
        raise NotImplementedError

    def reference(self, *arguments: Any) -> Any:
        """The result that `call` should have, from code of its own."""
        raise NotImplementedError

    def tensor_ops(self) -> int:
        """Warp-wide tensor-core instructions of the whole call (0: none)."""
        raise NotImplementedError

    def moved_bytes(self, report: Any) -> int:
        """Bytes moved where a kernel touches only part of its arguments; may be missing."""
        raise NotImplementedError

    def configs(self) -> list[Any]:
        """Candidate block sizes for `tune`, dataclasses of numbers, the default first; may be missing."""
        raise NotImplementedError


def cases(ops: list[str] | None = None, small: bool = False, on_cpu: bool = False) -> list[Case]:
    """The GPU's cases of `ops` (all by default), by op name or by `op/case`; with those of CPU kernels behind them if
    `on_cpu`. ValueError lists the known ops."""
    return _found(ops, ["SMALL" if small else "CASES"] + ["ON_CPU"] * on_cpu)


def cpu_cases(ops: list[str] | None = None) -> list[Case]:
    """Cases of CPU kernels alone, as `cases` has them."""
    return _found(ops, ["ON_CPU"])


def _found(ops: list[str] | None, lists: list[str]) -> list[Case]:
    there = [m for m, package in OPTIONAL.values() if importlib.util.find_spec(package)]
    modules = [importlib.import_module(m) for m in (*MODULES, *there)]
    known = [c for name in lists for m in modules for c in getattr(m, name, ())]
    if not ops:
        return known
    names = sorted({c.op for c in known})
    found = []
    for wanted in ops:
        op, _, name = wanted.partition("/")
        hits = [c for c in known if c.op == op and name in ("", c.name, c.name.removesuffix(".small"))]
        if op in OPTIONAL and op not in names:
            raise ValueError(f"OP: {op} needs {OPTIONAL[op][1]}: {_EXTRA}")
        if not hits:
            what = "kernel" if lists != ["ON_CPU"] else "CPU kernel"
            raise ValueError(f"OP: no {what} {wanted!r}; known: {', '.join(names)}, or OP/CASE as `list` prints them")
        found += hits
    return found
