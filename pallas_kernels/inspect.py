"""A compiled function, read: per kernel its launches, registers, spills, shared memory and machine code.

`report(fn, args, target)` compiles without a GPU (`deviceless`), assembles the PTX that XLA dumped with the same
`ptxas`, and disassembles it. Kernels of `jax_triton` never pass through XLA's compiler; theirs is in the program itself.
Everything here is compiled fact; times are modelled, in `lab.rows`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import deviceless, targets

TENSOR_OPS = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA")
_LAUNCH = re.compile(r"(\w+).*? (\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\](?:\s+shared_memory: (\d+))?")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop in machine code: instructions of one pass through its body, by opcode (inner loops excluded)."""

    ops: collections.Counter

    @property
    def instructions(self) -> int:
        return sum(self.ops.values())

    @property
    def tensor_ops(self) -> int:
        return count(self.ops, *TENSOR_OPS)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled kernel. Sizes in bytes; `blocks` and `threads` are products over the launch's axes."""

    name: str
    launches: int
    blocks: int
    threads: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    straight: collections.Counter  # opcodes outside loops
    loops: tuple[Loop, ...]

    @property
    def ops(self) -> collections.Counter:
        """Opcodes in the machine code, each counted once."""
        return sum((loop.ops for loop in self.loops), self.straight)

    @property
    def tensor_core_instructions(self) -> int:
        return count(self.ops, *TENSOR_OPS)

    def count(self, *prefixes: str) -> int:
        return count(self.ops, *prefixes)

    def blocks_per_sm(self, card: targets.Target) -> int:
        """Blocks that fit on one SM at once, by threads, registers (allocated in 256s a warp) and shared memory."""
        warps = -(-self.threads // 32)
        by_registers = card.registers_per_sm // (warps * (-(-self.registers * 32 // 256) * 256))
        # The driver keeps 1 KiB of shared memory for each block.
        by_smem = card.smem_per_sm // (self.smem_bytes + 1024)
        return min(card.threads_per_sm // (warps * 32), by_registers, by_smem, card.blocks_per_sm)

    def occupancy(self, card: targets.Target) -> float:
        return self.blocks_per_sm(card) * self.threads / card.threads_per_sm

    def executed(self, tensor_ops: int | None = None, trips: Sequence[float] | None = None) -> float:
        """Instructions one warp executes, on average: straight code + sum of loop body x passes.

        tensor_ops: tensor-core instructions a warp needs in all (known from the problem's size). The loops that
            contain some share what straight code leaves, so that unrolling by the compiler does not matter.
        trips: passes of each loop, in the order of their addresses; overrides the above. A loop without tensor-core
            instructions must be given.
        """
        total = float(sum(self.straight.values()))
        if trips is None:
            if tensor_ops is None and self.loops:
                raise ValueError(f"{self.name}: give tensor_ops or trips for its {len(self.loops)} loops")
            inside = sum(loop.tensor_ops for loop in self.loops)
            rest = (tensor_ops or 0) - count(self.straight, *TENSOR_OPS)
            if any(loop.tensor_ops == 0 for loop in self.loops):
                raise ValueError(f"{self.name}: a loop without tensor-core instructions needs trips")
            trips = [max(rest, 0) / inside] * len(self.loops)
        if len(trips) != len(self.loops):
            raise ValueError(f"{self.name}: {len(trips)} trips given, {len(self.loops)} loops found")
        return total + sum(loop.instructions * n for loop, n in zip(self.loops, trips, strict=True))

    def requested_bytes(self, trips: Sequence[float]) -> float:
        """Bytes a thread asks of global memory by loads, copies to shared memory included."""
        total = _load_bytes(self.straight)
        return total + sum(_load_bytes(loop.ops) * n for loop, n in zip(self.loops, trips, strict=True))


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled function: its kernels, launches and copies, and the bytes of its buffers."""

    target: targets.Target
    kernels: dict[str, Kernel]
    launches: int
    copies: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int


def count(ops: collections.Counter, *prefixes: str) -> int:
    """Opcodes that start with one of `prefixes`: `count(ops, "LDS.U8")`."""
    return sum(n for op, n in ops.items() if op.startswith(prefixes))


def _load_bytes(ops: collections.Counter) -> int:
    total = 0
    for op, n in ops.items():
        if op.startswith(("LDG.", "LDGSTS.")):
            width = re.search(r"\.(?:[SU]?(8|16)|(64|128))\b", op)
            total += n * (int(width[1] or width[2]) // 8 if width else 4)
    return total


def report(fn: Callable, args: Sequence[Any], target: str = "rtx4090", *, donate: Sequence[int] = ()) -> Report:
    """Compile `fn` for `target` and read the result; arguments as in `deviceless.compile_for`."""
    card = targets.get(target)
    with tempfile.TemporaryDirectory() as folder:
        compiled = deviceless.compile_for(fn, args, target, donate=donate, dump_to=folder)
        # A function made of constants or copies alone has no PTX worth assembling.
        ptx = [p for p in Path(folder).glob("*.ptx") if ".entry" in p.read_text()]
        thunks = "".join(p.read_text() for p in Path(folder).glob("*thunk_sequence.txt"))
        code: dict[str, dict] = {}
        for path in ptx:
            code |= _assemble(path, card)
    launches = [_LAUNCH.search(line) for line in thunks.splitlines()]
    launches = [m for m in launches if m]
    kernels = {}
    for m in launches:
        name = m[2]
        if name in kernels:
            kernels[name] = dataclasses.replace(kernels[name], launches=kernels[name].launches + 1)
            continue
        sizes = [int(v) for v in m.groups()[2:8]]
        found = code[name]
        kernels[name] = Kernel(
            name=name,
            launches=1,
            blocks=sizes[0] * sizes[1] * sizes[2],
            threads=sizes[3] * sizes[4] * sizes[5],
            smem_bytes=found.pop("static_smem") + int(m[9] or 0),
            **found,
        )
    calls = triton_calls(compiled.as_text() or "")
    for call in calls:
        kernels[call.name] = call.kernel(card, calls.count(call))
    memory: Any = compiled.memory_analysis()  # there for every compiled program, whatever its type says
    return Report(
        target=card,
        kernels=kernels,
        launches=len(launches) + len(calls),
        copies=len(re.findall(r"\bkCopy\b|\bkDeviceToDeviceCopy\b", thunks)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """A launch of a kernel that Triton compiled, as `jax_triton` hands it to XLA. Sizes as in `Kernel`."""

    name: str
    ptx: str
    blocks: int
    threads: int
    smem_bytes: int

    def kernel(self, card: targets.Target, launches: int = 1) -> Kernel:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(self.ptx)
            (found,) = _assemble(path, card).values()
        smem = self.smem_bytes + found.pop("static_smem")
        return Kernel(self.name, launches, self.blocks, self.threads, smem_bytes=smem, **found)


_TRITON_CALL = re.compile(r'"triton_kernel_call_ffi".*?opaque = "((?:[^"\\]|\\.)*)"')


def triton_calls(hlo: str) -> list[TritonCall]:
    """The `jax_triton` launches in the text of a compiled program; different kernels of one name get numbers.

    Each carries a zlib-compressed protocol buffer: the call (1) with its kernel (1: number of warps 2, dynamic shared
    memory 3, PTX 4) and its grid (2, 3, 4); its name (4). Zeros are left out.
    """
    calls: list[TritonCall] = []
    for found in _TRITON_CALL.finditer(hlo):
        whole = _fields(zlib.decompress(_unescape(found[1])))
        call = _fields(whole[1])
        kernel = _fields(call[1])
        made = TritonCall(
            name=whole[4].decode(),
            ptx=kernel[4].decode(),
            blocks=call.get(2, 1) * call.get(3, 1) * call.get(4, 1),
            threads=32 * kernel[2],
            smem_bytes=kernel.get(3, 0),
        )
        name, number = made.name, 0
        while any(c.name == made.name and c != made for c in calls):
            number += 1
            made = dataclasses.replace(made, name=f"{name}_{number}")
        calls.append(made)
    return calls


def _unescape(text: str) -> bytes:
    """A string as MLIR prints it: what is not plain text as a backslash and two hexadecimal digits."""
    parts = re.split(r"\\([0-9A-F]{2}|\\)", text)
    parts[1::2] = [chr(int(p, 16)) if p != "\\" else p for p in parts[1::2]]
    return "".join(parts).encode("latin-1")


def _fields(message: bytes) -> dict[int, Any]:
    """A protocol buffer's fields: varints as int, everything else as bytes; of a repeated one the last."""
    fields: dict[int, Any] = {}
    rest = message

    def varint() -> int:
        nonlocal rest
        value, shift = 0, 0
        while True:
            byte, rest = rest[0], rest[1:]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while rest:
        number, kind = divmod(varint(), 8)
        if kind == 0:
            fields[number] = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            fields[number], rest = rest[:size], rest[size:]
    return fields


def _read(pattern: str, text: str) -> re.Match[str]:
    """The first match of `pattern` in what a compiler's tool printed; RuntimeError where there is none."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"ptxas printed nothing that matches {pattern!r}: {text[:200]!r}")
    return found


def _assemble(ptx: Path, card: targets.Target) -> dict[str, dict]:
    """Assemble one PTX file: per kernel the resources `ptxas -v` prints and the machine code."""
    cubin = ptx.with_suffix(".cubin")
    arch = _read(r"^\.target (sm_\w+)", ptx.read_text())[1]
    log = _run("ptxas", "-v", f"-arch={arch}", str(ptx), "-o", str(cubin))
    sass = _run("nvdisasm", "-c", str(cubin))
    kernels = {}
    for entry in re.split(r"Compiling entry function ", log)[1:]:
        name = _read(r"^'(\S+)'", entry)[1]
        spilled = _read(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        static = re.search(r"(\d+) bytes smem", entry)
        straight, loops = _loops(sass, name)
        kernels[name] = {
            "registers": int(_read(r"Used (\d+) registers", entry)[1]),
            "spill_bytes": int(spilled[1]) + int(spilled[2]),
            "static_smem": int(static[1]) if static else 0,
            "straight": straight,
            "loops": loops,
        }
    return kernels


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([deviceless.binary_tool(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip().splitlines()[-1]}")
    # ptxas -v reports on stderr; nvdisasm warns there about its own formats.
    return done.stderr + done.stdout if tool == "ptxas" else done.stdout


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")


def _loops(sass: str, name: str) -> tuple[collections.Counter, tuple[Loop, ...]]:
    """Split a kernel's code into straight code and loops: a branch to an earlier label closes a loop.

    Code after the final EXIT (the self-branch and padding) is never executed and left out.
    """
    section = sass.split(f".text.{name}:\n", 1)[1].split("//------", 1)[0]
    labels: dict[str, int] = {}
    code: list[tuple[int, str, str]] = []
    for line in section.splitlines():
        if m := re.match(r"\s*(\.L_\w+):", line):
            labels[m[1]] = len(code)
        elif m := _INSTRUCTION.search(line):
            code.append((int(m[1], 16), m[2], m[3]))
    spans = []
    for i, (_, op, rest) in enumerate(code):
        target = re.search(r"`\((\.L_\w+)\)", rest)
        if op.startswith("BRA") and target and labels.get(target[1], i) < i:  # a branch to itself is padding
            spans.append((labels[target[1]], i + 1))
    last_exit = max(i for i, (_, op, _) in enumerate(code) if op == "EXIT")
    # Several back edges to one label are one loop.
    merged: dict[int, int] = {}
    for start, stop in spans:
        merged[start] = max(stop, merged.get(start, 0))
    spans = sorted(merged.items())
    inside: list[collections.Counter] = [collections.Counter() for _ in spans]
    straight: collections.Counter = collections.Counter()
    for i, (_, op, _) in enumerate(code):
        if i > last_exit:
            continue
        # The innermost span that holds the instruction: the one that starts last.
        holders = [j for j, (start, stop) in enumerate(spans) if start <= i < stop]
        (inside[holders[-1]] if holders else straight)[op] += 1
    return straight, tuple(Loop(ops) for ops in inside)
