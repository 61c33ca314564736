"""One row of facts per kernel case: compiled figures, and a time modelled from them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pallas_kernels import inspect
from pallas_kernels.lab.registry import Case


@dataclasses.dataclass(frozen=True)
class Row:
    """Compiled: everything up to `thread_instructions_per_byte`. Modelled: the rest.

    Of a case with several launches, registers to `tensor_core_instructions` are those of its main kernel, see
    `main_kernel`; `launches` counts all.
    loop_passes: of its loop with most passes; thread_instructions: of all blocks together.
    conversions: instructions from integer to float; loads: opcodes of memory access, each counted once.
    requested_bytes: what loads ask of L2 (a block's re-reads included); bytes_moved: buffers, each once.
    modelled_us: the longest of bytes_moved / bandwidth, thread instructions / issue rate, and multiply-adds / tensor
    rate; `limit` names it. No launch cost, no latency: a floor.
    """

    op: str
    case: str
    target: str
    kernel: str
    launches: int
    blocks: int
    threads: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    blocks_per_sm: int
    occupancy: float
    tensor_core_instructions: int
    conversions: int
    loads: dict[str, int]
    bytes_moved: int
    ideal_bytes: int
    requested_bytes: int
    loop_passes: float
    thread_instructions: int
    thread_instructions_per_byte: float
    multiply_adds: int
    modelled_us: float
    limit: str

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure(case: Case, target: str, config: Any = None) -> Row:
    """Compile `case` for `target`, with block sizes `config` where the case takes some, and count."""
    call = functools.partial(case.call, config=config) if config is not None else case.call
    report = inspect.report(call, case.arguments(), target, donate=getattr(case, "donate", ()))
    card = report.target
    kernel = main_kernel(report)
    trips = loop_trips(kernel, case)
    instructions = kernel.executed(trips=trips) * (-(-kernel.threads // 32) * 32) * kernel.blocks
    requested = kernel.requested_bytes(trips) * kernel.threads * kernel.blocks
    moved = case.moved_bytes(report) if hasattr(case, "moved_bytes") else moved_bytes(report)
    rate = card.tensor_8 if kernel.count("IMMA") else card.tensor_16
    times = {
        "memory": moved / card.bandwidth,
        "issue": instructions / card.issue_rate,
        "tensor": case.multiply_adds / rate if case.tensor_ops() else 0.0,
    }
    limit = max(times, key=times.__getitem__)
    return Row(
        op=case.op,
        case=case.name,
        target=target,
        kernel=kernel.name,
        launches=report.launches,
        blocks=kernel.blocks,
        threads=kernel.threads,
        registers=kernel.registers,
        spill_bytes=max(k.spill_bytes for k in report.kernels.values()),
        smem_bytes=kernel.smem_bytes,
        blocks_per_sm=kernel.blocks_per_sm(card),
        occupancy=kernel.occupancy(card),
        tensor_core_instructions=kernel.tensor_core_instructions,
        conversions=kernel.count("I2F", "I2FP"),
        loads={op: n for op, n in sorted(kernel.ops.items()) if op.startswith(("LDG", "LDS", "STG", "LDL", "STL"))},
        bytes_moved=moved,
        ideal_bytes=case.ideal_bytes,
        requested_bytes=int(requested),
        loop_passes=max(trips, default=0),
        thread_instructions=int(instructions),
        thread_instructions_per_byte=instructions / case.weight_bytes,
        multiply_adds=case.multiply_adds,
        modelled_us=times[limit] * 1e6,
        limit=limit,
    )


def main_kernel(report: inspect.Report) -> inspect.Kernel:
    """The kernel on tensor cores, or else the one with most machine code x threads: the others prepare or merge."""
    return max(report.kernels.values(), key=lambda k: (k.tensor_core_instructions > 0, sum(k.ops.values()) * k.threads * k.blocks))


def loop_trips(kernel: inspect.Kernel, case: Case) -> list[float]:
    """Passes of each loop of the kernel, by address.

    Loops with tensor-core instructions share the case's: passes = (instructions a warp needs - those outside) / those
    inside. That holds however far the compiler unrolled. The others are as the case says.
    """
    others = iter(getattr(case, "other_trips", tuple)())
    warps = -(-kernel.threads // 32) * kernel.blocks
    inside = sum(loop.tensor_ops for loop in kernel.loops)
    rest = case.tensor_ops() / warps - inspect.count(kernel.straight, *inspect.TENSOR_OPS)
    return [max(rest, 0) / inside if loop.tensor_ops else next(others) for loop in kernel.loops]


def moved_bytes(report: inspect.Report) -> int:
    """Arguments and outputs once, temporaries written and read. In-place outputs are counted twice: read and written."""
    return report.argument_bytes + report.output_bytes + 2 * report.temporary_bytes


def table(rows: list[Row]) -> str:
    """The rows as fixed-width text."""
    head = (
        f"{'case':42} {'regs':>4} {'spill':>5} {'smem':>6} {'b/SM':>4} {'occ':>5} {'mma':>4} "
        f"{'bytes/ideal':>11} {'L2 asks':>7} {'instr/B':>7} {'us':>8} limit"
    )
    lines = [head]
    for r in rows:
        lines.append(
            f"{r.op + '/' + r.case:42.42} {r.registers:4} {r.spill_bytes:5} {r.smem_bytes:6} {r.blocks_per_sm:4} "
            f"{r.occupancy:5.0%} {r.tensor_core_instructions:4} {r.bytes_moved / r.ideal_bytes:11.3f} "
            f"{r.requested_bytes / r.ideal_bytes:7.2f} {r.thread_instructions_per_byte:7.2f} {r.modelled_us:8.1f} {r.limit}"
        )
    return "\n".join(lines)


def compare(old: list[dict[str, Any]], new: list[Row]) -> str:
    """Changes between two reports, one line per field of a case."""
    before = {(r["op"], r["case"], r["target"]): r for r in old}
    lines = []
    for row in new:
        key = (row.op, row.case, row.target)
        if key not in before:
            lines.append(f"{row.op}/{row.case}: new")
            continue
        for field, value in row.json().items():
            if before[key].get(field) != value:
                lines.append(f"{row.op}/{row.case}: {field} {_short(before[key].get(field))} -> {_short(value)}")
    gone = before.keys() - {(r.op, r.case, r.target) for r in new}
    lines += [f"{op}/{case}: not in the new report" for op, case, _ in sorted(gone)]
    return "\n".join(lines) or "no change"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
