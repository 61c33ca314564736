"""Runs compiled kernels on a CPU: the PTX that a card would assemble, all threads in step, in NumPy.

Blocks that branch differently go on one after another. Beside results, a run proves that every access falls inside an
array, that warps meet at a barrier before one reads from shared memory what another wrote, and that no block touches
what another one wrote. It knows the instructions of kernels without tensor cores; an unknown one raises KeyError.

Arithmetic is IEEE float32 as the instruction rounds it, apart from the approximate ones (`ex2.approx`, `rsqrt.approx`,
`div.full`), which are rounded correctly here, and from `fma`, whose sum is rounded to float64 on the way.
"""

import functools
import re
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from pallas_kernels import deviceless

GUARD = 256
SHARED = 16 * 1024  # of a block
_WIDTHS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_TYPES = {"s": {"16": np.int16, "32": np.int32, "64": np.int64}, "f": {"32": np.float32}, "u": _WIDTHS, "b": _WIDTHS}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~(a != b) | np.isnan(a) | np.isnan(b),
    "neu": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


@functools.cache
def ptx_of(case, target="rtx4090"):
    """The PTX of a lab case's one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        deviceless.compile_for(case.call, case.arguments(), target, donate=getattr(case, "donate", ()), dump_to=folder)
        (text,) = (t for t in (p.read_text() for p in Path(folder).glob("*.ptx")) if ".entry" in t)
    return text


def call(case, arguments, grid):
    """What `case.call(*arguments)` returns on a card, for a case of one kernel whose parameters are arguments, then outputs.

    Outputs hold NaN before the kernel writes them; the last outputs of a case with `donate` are those arguments.
    """
    outputs, tree = jax.tree.flatten(jax.eval_shape(case.call, *case.arguments()))
    given = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    donated = getattr(case, "donate", ())
    empty = [np.full(o.shape, np.nan, o.dtype) for o in outputs]
    first = len(given) + len(outputs) - len(donated)
    same = [(first + i, at) for i, at in enumerate(donated)]
    left = run(ptx_of(case), given + empty, grid, same)
    return jax.tree.unflatten(tree, left[len(given) :])


def run(ptx, arrays, grid, same=()):
    """Executes the one kernel of `ptx` and returns copies of `arrays` (its parameters in order) as it left them.

    grid: blocks along x and y. same: pairs (parameter, parameter) that share their memory.
    """
    same = dict(same)
    arrays = [np.array(a) for a in arrays]
    at, total = {}, GUARD
    for i, array in enumerate(arrays):
        if i not in same:
            at[i], total = total, total + -(-array.nbytes // GUARD) * GUARD + GUARD
    at |= {i: at[other] for i, other in same.items()}
    memory = _Memory(total)
    for i, array in enumerate(arrays):
        if i not in same:
            memory.place(at[i], array)
    code, labels = _parse(ptx)
    threads = np.prod([int(n) for n in re.search(r"\.reqntid (\d+), (\d+), (\d+)", ptx).groups()])
    shared = _Memory(grid[0] * grid[1] * SHARED, exists=True)
    waiting = [(_Threads(memory, shared, at, np.repeat(np.arange(grid[0] * grid[1]), threads), threads, grid[0]), 0)]
    while waiting:
        waiting += _run(*waiting.pop(), code, labels)
    return [memory.bytes[at[i] :][: a.nbytes].view(a.dtype).reshape(a.shape).copy() for i, a in enumerate(arrays)]


class _Memory:
    """Bytes, which of them exist, and who wrote or read them last (-1: nobody, -2: several)."""

    def __init__(self, size, exists=False):
        self.bytes = np.zeros(size, np.uint8)
        self.exists = np.full(size, exists)
        self.writer, self.reader = (np.full(size, -1) for _ in range(2))

    def place(self, at, array):
        self.bytes[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        self.exists[at : at + array.nbytes] = True

    def read(self, addresses, size, who):
        where, who = self._where(addresses, size, who)
        self._refuse(self.writer[where], who, "reads what another wrote")
        before = self.reader[where]
        self.reader[where] = np.where((before == -1) | (before == who), who, -2)
        self.reader[where[self.reader[where] != who]] = -2
        return self.bytes[where]

    def write(self, addresses, value, who):
        """Several may write the same bytes: threads that hold copies of an element do."""
        where, who = self._where(addresses, value.shape[1], who)
        changed = self.bytes[where] != value
        self._refuse(self.reader[where][changed], who[changed], "writes what another read")
        self._refuse(self.writer[where][changed], who[changed], "writes what another wrote")
        self.bytes[where], self.writer[where] = value, who
        self._refuse(self.writer[where][self.bytes[where] != value], -2, "writes what another wrote")

    def _where(self, addresses, size, who):
        where = addresses.astype(np.int64)[:, None] + np.arange(size)
        if where.size and (where.min() < 0 or where.max() >= len(self.bytes) or not self.exists[where].all()):
            raise AssertionError("access outside every array")
        return where, np.broadcast_to(who[:, None], where.shape)

    @staticmethod
    def _refuse(others, who, what):
        if ((others != -1) & (others != who)).any():
            raise AssertionError(f"a warp or block {what}")


def _run(threads, at, code, labels):
    """Runs `threads` from instruction `at` to their end, or to a branch that only some blocks take: then [(threads, at)]."""
    while True:
        predicate, negated, op, operands = code[at]
        at += 1
        mask = None if predicate is None else threads.registers[predicate] ^ negated
        if op[0] == "ret":
            return []
        if op[0] == "bra":
            if mask is None or mask.all():
                at = labels[operands[0]]
            elif mask.any():
                return [(threads.only(mask), labels[operands[0]]), (threads.only(~mask), at)]
        elif op[0] in ("ld", "st") and not op[1].startswith("param"):
            threads.access(op, operands, mask)
        elif op[0] == "bar":
            threads.meet()
        elif op[0] == "mov" and len(operands) == 3:
            threads.halves(operands)
        else:
            assert mask is None, op
            threads.registers[operands[0]] = threads.compute(op, operands)


class _Threads:
    """Whole blocks of threads at one instruction: their registers, as unsigned bits or predicates."""

    def __init__(self, memory, shared, parameters, block, size, across):
        self.memory, self.shared, self.parameters, self.block, self.size = memory, shared, parameters, block, size
        self.lanes = np.arange(len(block))
        special = {"%tid.x": self.lanes % size, "%ctaid.x": block % across, "%ctaid.y": block // across, "%ctaid.z": 0 * block}
        self.registers = {k: v.astype(np.uint32) for k, v in special.items()}
        self.registers["global_smem"] = (block * SHARED).astype(np.uint64)

    def only(self, mask):
        blocks = mask.reshape(-1, self.size)
        if (blocks.any(1) != blocks.all(1)).any():
            raise AssertionError("the threads of a block part ways")
        part = _Threads(self.memory, self.shared, self.parameters, self.block[mask], self.size, 1)
        part.registers = {k: v[mask] for k, v in self.registers.items()}
        return part

    def meet(self):
        for marks in (self.shared.writer, self.shared.reader):
            marks.reshape(-1, SHARED)[self.block[:: self.size]] = -1

    def halves(self, operands):
        """mov between a register and two of half its size."""
        first, second, third = operands
        if first.startswith("%rs"):
            self.registers[first], self.registers[second] = self.registers[third].view(np.uint16).reshape(-1, 2).T.copy()
        else:
            self.registers[first] = np.stack([self.registers[second], self.registers[third]], 1).view(np.uint32)[:, 0]

    def _value(self, operand, kind):
        """An operand's bits as `kind`; immediates are decimal integers or float32 bits after 0f."""
        if operand in self.registers:
            bits = self.registers[operand]
            return bits if kind is bool else bits.view(kind)
        if operand.startswith("0f"):
            bits = np.full(len(self.lanes), int(operand[2:], 16), np.uint32)
        else:
            number, size = int(operand, 0), np.dtype(kind).itemsize
            if kind is bool:
                return np.full(len(self.lanes), bool(number))
            bits = np.full(len(self.lanes), number % (1 << (8 * size)), f"u{size}")
        return bits.view(kind)

    def access(self, op, operands, mask):
        load, shared = op[0] == "ld", op[1] == "shared"
        address, names = (operands[-1], operands[:-1]) if load else (operands[0], operands[1:])
        base, _, offset = address.strip("[] ").partition("+")
        kind = _WIDTHS[op[-1][1:]]
        size = np.dtype(kind).itemsize
        memory, who = (self.shared, self.lanes // 32) if shared else (self.memory, self.block)
        active = np.full(len(self.lanes), True) if mask is None else mask
        start = self._value(base.strip(), np.uint64)[active] + np.uint64(int(offset or 0))
        assert not (start % np.uint64(size * len(names))).any(), "misaligned"
        if shared and (start // np.uint64(SHARED) != self.block[active]).any():
            raise AssertionError("access outside the block's shared memory")
        for i, name in enumerate(names):
            at = start + np.uint64(i * size)
            if load:
                found = self.registers.get(name, np.zeros(len(self.lanes), kind)).copy()
                found[active] = np.ascontiguousarray(memory.read(at, size, who[active])).view(kind)[:, 0]
                self.registers[name] = found
            else:
                memory.write(at, self._value(name, kind)[active][:, None].copy().view(np.uint8), who[active])

    def compute(self, op, operands):
        name, suffixes = op[0], op[1:]
        kinds = [_TYPES[s[0]][s[1:]] for s in suffixes if s[0] in "sfub" and s[1:] in _WIDTHS and s[1:] in _TYPES[s[0]]]
        kind = bool if suffixes[-1] == "pred" else kinds[-1] if kinds else None
        if name == "ld":
            return np.full(len(self.lanes), self.parameters[int(re.search(r"_param_(\d+)", operands[1])[1])], np.uint64)
        if name == "cvt":
            return self._convert(suffixes, operands[1])
        if name == "selp":
            return np.where(self.registers[operands[3]], *(self._value(o, kind) for o in operands[1:3])).view(_bits(kind))
        if name == "shfl":
            return self._value(operands[1], np.uint32)[self.lanes ^ int(operands[2])]
        a, *rest = (self._value(o, kind) for o in operands[1:])
        with np.errstate(all="ignore"):
            if name == "setp":
                return _COMPARE[suffixes[0]](a, *rest)
            if kind is np.float32:
                result = _float(name, suffixes, a, *rest)
            else:
                result = _integer(name, suffixes, kind, a, *rest)
        return result if kind is bool else result.view(_bits(result.dtype))

    def _convert(self, suffixes, operand):
        to, source = suffixes[-2:]
        if source == "bf16":
            return self.registers[operand].view(ml_dtypes.bfloat16).astype(np.float32).view(np.uint32)
        value = self._value(operand, _TYPES[source[0]][source[1:]])
        if to == "bf16":
            return value.astype(ml_dtypes.bfloat16).view(np.uint16)
        if "sat" in suffixes:
            value = np.clip(np.nan_to_num(value, nan=0.0), 0, 1)
        result = value.astype(_TYPES[to[0]][to[1:]])
        return result.view(_bits(result.dtype))


def _bits(kind):
    return f"u{np.dtype(kind).itemsize}"


def _round(exact, mode):
    """float64 to float32: to the nearest, downwards (rm) or towards zero (rz)."""
    near = exact.astype(np.float32)
    if "rm" in mode:
        return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
    if "rz" in mode:
        return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    return near


def _float(name, suffixes, a, *rest):
    wide = [x.astype(np.float64) for x in (a, *rest)]
    exact = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma": lambda a, b, c: a * b + c,
        "div": lambda a, b: a / b,
        "ex2": np.exp2,
        "rsqrt": lambda a: 1 / np.sqrt(a),
        "neg": np.negative,
        "abs": np.abs,
        "max": np.fmax,
        "min": np.fmin,
        "mov": lambda a: a,
    }[name](*wide)
    result = _round(exact, suffixes)
    if "ftz" in suffixes:
        result = np.where(np.abs(result) < np.finfo(np.float32).tiny, np.float32(0), result)
    return result.astype(np.float32)


def _integer(name, suffixes, kind, a, *rest):
    if name == "mul" or name == "mad":
        size = np.dtype(kind).itemsize * 8
        wide = np.int64 if np.issubdtype(kind, np.signedinteger) else np.uint64
        product = a.astype(wide) * rest[0].astype(wide)
        if suffixes[0] == "wide":
            return product
        low = (product >> wide(size) if suffixes[0] == "hi" else product).astype(kind)
        return low + rest[1] if name == "mad" else low
    if name in ("shl", "shr"):
        return {"shl": np.left_shift, "shr": np.right_shift}[name](a, rest[0].astype(kind))
    return {
        "add": np.add,
        "sub": np.subtract,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "min": np.minimum,
        "max": np.maximum,
        "neg": np.negative,
        "not": np.invert,
        "mov": np.array,
        "cvta": np.array,
    }[name](a, *rest)


def _parse(ptx):
    """Instructions (predicate, negated, opcode parts, operands), vector operands flattened, and the labels among them."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.rindex("}")]
    code, labels = [], {}
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
            continue
        for statement in filter(None, (s.strip() for s in line.split(";"))):
            if statement.startswith("."):
                continue
            m = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", statement)
            operands = [o.strip() for o in re.sub(r"[{}]", "", m[4]).split(",") if o.strip()]
            code.append((m[2], m[1] == "!", m[3].split("."), operands))
    return code, labels
