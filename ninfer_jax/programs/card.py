"""Programs compiled for a card that need not be here, and what the compiler made of them."""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import deviceless
from pallas_kernels.launch import lowering_for

Source = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # function, argument shapes, donated positions
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\s+\[[^\]]*\]\s*(\S*)")
_COPIES = ("kCopy", "kDeviceToDeviceCopy", "kMemcpy")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Compiled facts of one program (times measured where it was compiled).

    kernels: launches a step makes, by kernel name; copies: device copies among its steps. The branches of conditionals
    are counted apart, in `branch_kernels` and `branch_copies`: of each, one runs. shortest: launches, copies and fills of a
    step that takes the branch with fewest of them each time; in a round that is greedy sampling without log-probabilities.
    Byte counts are XLA's buffers.
    """

    name: str
    target: str
    lower_s: float
    compile_s: float
    kernels: collections.Counter
    branch_kernels: int
    conditionals: int
    copies: int
    branch_copies: int
    shortest: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int

    @property
    def launches(self) -> int:
        return sum(self.kernels.values())

    @property
    def workspace_bytes(self) -> int:
        """Bytes that it takes of the device beside its arguments."""
        return _workspace(self.temporary_bytes, self.output_bytes, self.aliased_bytes)

    def json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        derived = {"launches": self.launches, "workspace_bytes": self.workspace_bytes}
        return fields | {"kernels": dict(self.kernels.most_common())} | derived


def workspace_bytes(compiled: jax.stages.Compiled) -> int | None:
    """`Compilation.workspace_bytes` of a program; None where a loaded executable does not tell."""
    memory = compiled.memory_analysis()
    return memory and _workspace(memory.temp_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes)


def _workspace(temporary: int, output: int, aliased: int) -> int:
    """Bytes of temporaries, and of results that take no argument's place."""
    return temporary + output - aliased


def compile_program(name: str, source: Source, target: str) -> tuple[jax.stages.Compiled, Compilation]:
    """Compile `source` (as `Programs.source` gives it) for `target`. ValueError for an unknown target, RuntimeError where
    the compiler's wheels are missing."""
    function, arguments, donated = source
    with tempfile.TemporaryDirectory() as folder, lowering_for("cuda"):
        start = time.perf_counter()
        lowered = deviceless.lower_for(function, arguments, target, donate=donated, keep_unused=True)
        between = time.perf_counter()
        compiled = deviceless.compile_lowered(lowered, dump_to=folder)
        done = time.perf_counter()
        thunks = "".join(p.read_text() for p in sorted(Path(folder).glob("*thunk_sequence.txt")))
    return compiled, facts_of(name, target, compiled, between - start, done - between, thunks)


def facts_of(
    name: str, target: str, compiled: jax.stages.Compiled, lower_s: float, compile_s: float, thunks: str = ""
) -> Compilation:
    """The facts of a compiled program; thunks: XLA's dump of its steps, which only a card's compiler writes."""
    memory: Any = compiled.memory_analysis()  # there for every compiled program, whatever its type says
    kernels: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    for line in thunks.splitlines():
        if not (found := _THUNK.match(line)):
            continue
        indent, kind, kernel = found.groups()
        where = "branch" if indent else "step"
        if kind in _COPIES:
            counts[where, "copy"] += 1
        elif kind == "kConditional":
            counts["conditionals"] += not indent
        elif where == "step":
            kernels[re.sub(r"__\d+$", "", kernel)] += 1
        else:
            counts["branch", "kernel"] += 1
    return Compilation(
        name=name,
        target=target,
        lower_s=lower_s,
        compile_s=compile_s,
        kernels=kernels,
        branch_kernels=counts["branch", "kernel"],
        conditionals=counts["conditionals"],
        copies=counts["step", "copy"],
        branch_copies=counts["branch", "copy"],
        shortest=shortest_path(thunks),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


def shortest_path(thunks: str) -> int:
    """Steps of XLA's dump `thunks` that run if of every conditional the branch with fewest of them is taken."""
    # A branch without steps says so on the line that names the next one.
    lines = [line for line in re.sub(r"No thunks\.", "\n", thunks).splitlines() if line.strip()]

    def depth(line: str) -> int:
        return len(line) - len(line.lstrip())

    def block(at: int, inside: int) -> tuple[int, int]:
        """Steps of the block that starts at line `at`, indented by at least `inside`, and the line after it."""
        steps = 0
        while at < len(lines) and depth(lines[at]) >= inside:
            conditional, here = "kConditional" in lines[at], depth(lines[at])
            steps, at = steps + (_THUNK.match(lines[at]) is not None and not conditional), at + 1
            if conditional:
                branches = []
                while at < len(lines) and depth(lines[at]) > here:
                    taken, at = block(at + 1, depth(lines[at]) + 1)
                    branches.append(taken)
                steps += min(branches, default=0)
        return steps, at

    return block(0, 0)[0]
