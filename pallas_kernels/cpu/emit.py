"""Words for writing a kernel in Python: values that know their operators, loops with sums in registers, arrays by index.

A vector is 16 lanes of float32 wherever a sum runs across lanes: two registers under AVX2, one under AVX-512, the same bits
under both. LLVM gets no leave to reorder or contract: a * b + c is two roundings and `fma(a, b, c)` one, everywhere. A
horizontal sum is a fixed tree. Square root and division are IEEE's.
"""

# llvmlite has no types: what comes of it is Any.
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir
import numpy as np

LANES = 16
_STACK_BYTES = 64 * 1024

F32, I1, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
PTR = I8.as_pointer()
_STORED = {
    "float32": F32,
    "bfloat16": I16,
    "float16": I16,
    "int8": I8,
    "uint8": I8,
    "bool": I8,
    "int16": I16,
    "uint16": I16,
    "int32": I32,
    "uint32": I32,
    "int64": I64,
}
_UNSIGNED = ("uint8", "uint16", "uint32", "bool")

Number = Any  # a Value, or a Python number that takes the other side's type


class Value:
    """A scalar or vector under construction. + - * / on floats, + - * // % & | ^ << >> on integers (signed; `shr` fills with
    zeros), comparisons on both (masks, bits of i1). Python numbers and scalars spread over the lanes of the other side."""

    __slots__ = ("c", "ir")

    def __init__(self, c: Code, value: Any):
        self.c, self.ir = c, value

    @property
    def type(self) -> Any:
        """Type of one lane."""
        return self.ir.type.element if isinstance(self.ir.type, ir.VectorType) else self.ir.type

    @property
    def lanes(self) -> int:
        """0 for a scalar."""
        return self.ir.type.count if isinstance(self.ir.type, ir.VectorType) else 0

    @property
    def floating(self) -> bool:
        return isinstance(self.type, ir.FloatType)

    def _with(self, other: Number) -> tuple[Value, Value]:
        other = self.c.value(other, self.type)
        if other.lanes and not self.lanes:
            return self.c.spread(self, other.lanes), other
        if self.lanes and not other.lanes:
            return self, self.c.spread(other, self.lanes)
        return self, other

    def _binary(self, other: Number, real: str, whole: str, swap: bool = False) -> Value:
        a, b = self._with(other)
        name = real if a.floating else whole
        if not name:
            raise TypeError(f"no such operation on {a.ir.type}")
        return Value(self.c, getattr(self.c.b, name)(*((b.ir, a.ir) if swap else (a.ir, b.ir))))

    def __add__(self, other: Number) -> Value:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Number) -> Value:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Number) -> Value:
        return self._binary(other, "fsub", "sub", swap=True)

    def __mul__(self, other: Number) -> Value:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Number) -> Value:
        return self._binary(other, "fdiv", "")

    def __rtruediv__(self, other: Number) -> Value:
        return self._binary(other, "fdiv", "", swap=True)

    def __floordiv__(self, other: Number) -> Value:
        """Towards zero."""
        return self._binary(other, "", "sdiv")

    def __mod__(self, other: Number) -> Value:
        """With the sign of the left side."""
        return self._binary(other, "", "srem")

    def __and__(self, other: Number) -> Value:
        return self._binary(other, "", "and_")

    def __or__(self, other: Number) -> Value:
        return self._binary(other, "", "or_")

    def __xor__(self, other: Number) -> Value:
        return self._binary(other, "", "xor")

    def __lshift__(self, other: Number) -> Value:
        return self._binary(other, "", "shl")

    def __rshift__(self, other: Number) -> Value:
        return self._binary(other, "", "ashr")

    def shr(self, other: Number) -> Value:
        return self._binary(other, "", "lshr")

    def __neg__(self) -> Value:
        return Value(self.c, self.c.b.fneg(self.ir)) if self.floating else 0 - self

    def _compare(self, sign: str, other: Number) -> Value:
        a, b = self._with(other)
        compare = self.c.b.fcmp_ordered if a.floating else self.c.b.icmp_signed
        return Value(self.c, compare(sign, a.ir, b.ir))

    def __lt__(self, other: Number) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Number) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Number) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Number) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Number) -> Value:
        return self._compare("==", other)

    def differs(self, other: Number) -> Value:
        return self._compare("!=", other)

    def to(self, kind: Any, signed: bool = True) -> Value:
        """Converted by value: integers widen or are cut, floats become integers towards zero."""
        if kind == self.type:
            return self
        b, target = self.c.b, self.c.shaped(kind, self.lanes)
        if self.floating:
            done = b.fptosi(self.ir, target)
        elif isinstance(kind, ir.FloatType):
            done = (b.sitofp if signed else b.uitofp)(self.ir, target)
        elif kind.width < self.type.width:
            done = b.trunc(self.ir, target)
        else:
            done = (b.sext if signed and self.type != I1 else b.zext)(self.ir, target)
        return Value(self.c, done)

    def bits(self, kind: ir.Type, lanes: int | None = None) -> Value:
        """The same bits as another type of lane; lanes: where lanes change their size."""
        return Value(self.c, self.c.b.bitcast(self.ir, self.c.shaped(kind, self.lanes if lanes is None else lanes)))

    def lane(self, i: int | Value) -> Value:
        index = i.ir if isinstance(i, Value) else ir.Constant(I32, i)
        return Value(self.c, self.c.b.extract_element(self.ir, index))

    def take(self, indices: Sequence[int], other: Value | None = None) -> Value:
        """Lanes in a fixed order; those of `other` count on from this value's."""
        second = other.ir if other is not None else ir.Constant(self.ir.type, ir.Undefined)
        mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
        return Value(self.c, self.c.b.shuffle_vector(self.ir, second, mask))

    def sum(self) -> Value:
        """Sum of all lanes, by halves: lane i and lane i + lanes / 2 first."""
        return self._fold(lambda a, b: a + b)

    def max(self) -> Value:
        return self._fold(self.c.maximum)

    def min(self) -> Value:
        return self._fold(self.c.minimum)

    def _fold(self, join: Callable[[Value, Value], Value]) -> Value:
        v, n = self, self.lanes
        while n > 1:
            n //= 2
            v = join(v.take(range(n)), v.take(range(n, 2 * n)))
        return v.lane(0)


class View:
    """A row-major array in memory. Indices are ints or I64 values, a leading part of them or all; missing ones are 0."""

    def __init__(self, c: Code, pointer: Any, shape: Sequence[int], dtype: Any):
        self.c, self.pointer, self.shape, self.dtype = c, pointer, tuple(shape), np.dtype(dtype).name
        if self.dtype not in _STORED:
            raise ValueError(f"CPU kernels have no arrays of {self.dtype}")
        self.stored = _STORED[self.dtype]
        self.itemsize = max(1, self.stored.width // 8) if isinstance(self.stored, ir.IntType) else 4

    def at(self, *index: int | Value) -> ir.Value:
        """Address of an element, as bytes."""
        fixed, moving = 0, None
        for axis, i in enumerate(index):
            stride = int(np.prod(self.shape[axis + 1 :], dtype=np.int64)) * self.itemsize
            if isinstance(i, Value):
                step = i.to(I64) * stride if stride != 1 else i.to(I64)
                moving = step if moving is None else moving + step
            else:
                fixed += int(i) * stride
        base = self.pointer if moving is None else self.c.b.gep(self.pointer, [moving.ir])
        return self.c.b.gep(base, [ir.Constant(I64, fixed)]) if fixed else base

    def load(self, *index: int | Value, lanes: int = 0, align: int = 0) -> Value:
        """One element, or `lanes` along the last axis: float32 of every float, integers as they are stored."""
        raw = self.raw(*index, lanes=lanes, align=align)
        if self.dtype == "float16":
            return self.c.from_f16(raw)
        return self.c.from_bf16(raw) if self.dtype == "bfloat16" else raw

    def raw(self, *index: int | Value, lanes: int = 0, align: int = 0) -> Value:
        """One element or `lanes`, as `load`, but floats of 16 bits as their bits."""
        kind = self.c.shaped(self.stored, lanes)
        read: Any = self.c.b.load(self.c.b.bitcast(self.at(*index), kind.as_pointer()))
        read.align = align or self.itemsize
        return Value(self.c, read)

    def store(self, value: Number, *index: int | Value, align: int = 0) -> None:
        """`value`, scalar or vector along the last axis; float32 is rounded to nearest where the array has 16 bits."""
        value = self.c.value(value, F32 if self.dtype in ("float32", "bfloat16", "float16") else self.stored)
        if self.dtype in ("bfloat16", "float16") and value.floating:
            value = self.c.to_bf16(value) if self.dtype == "bfloat16" else self.c.to_f16(value)
        elif value.type != self.stored:
            value = value.to(self.stored)
        place = self.c.b.bitcast(self.at(*index), value.ir.type.as_pointer())
        written: Any = self.c.b.store(value.ir, place)
        written.align = align or self.itemsize

    def integer(self, *index: int | Value) -> Value:
        """One element of an integer array as I64."""
        return self.load(*index).to(I64, signed=self.dtype not in _UNSIGNED)

    def pointer_at(self, offset: int | Value) -> ir.Value:
        """Address of element `offset` from the start, in the order of memory, inside the array or not."""
        return (
            self.at(*(0,) * (len(self.shape) - 1), offset)
            if self.shape
            else self.c.b.gep(self.pointer, [(self.c.value(offset, I64) * self.itemsize).ir])
        )

    def part(self, *index: int | Value) -> View:
        """The sub-array that `index` leaves."""
        return View(self.c, self.at(*index), self.shape[len(index) :], self.dtype)


class Code:
    """One function under construction. `part`: which share of the work this call is, I64 from 0 (None in `before`, `after`)."""

    f32, i1, i8, i16, i32, i64 = F32, I1, I8, I16, I32, I64

    def __init__(self, fn: ir.Function):
        self.fn, self.b = fn, ir.IRBuilder(fn.append_basic_block("entry"))
        self.part: Any = None

    # Values

    def shaped(self, kind: ir.Type, lanes: int) -> ir.Type:
        return ir.VectorType(kind, lanes) if lanes else kind

    def value(self, number: Number, kind: ir.Type = I64) -> Value:
        """A constant of `kind`; Values stay as they are."""
        return number if isinstance(number, Value) else self.constant(number, kind)

    def constant(self, number: Any, kind: ir.Type = F32, lanes: int = 0) -> Value:
        """A scalar; a sequence, one lane each; or `number` in all `lanes`."""
        convert: Callable[[Any], Any] = (lambda x: float(np.float32(x))) if isinstance(kind, ir.FloatType) else int
        if np.ndim(number):
            return Value(self, ir.Constant(ir.VectorType(kind, len(number)), [convert(x) for x in number]))
        if lanes:
            return Value(self, ir.Constant(ir.VectorType(kind, lanes), [convert(number)] * lanes))
        return Value(self, ir.Constant(kind, convert(number)))

    def index(self, number: int) -> Value:
        """A constant to count with, I64."""
        return self.constant(number, I64)

    def zeros(self, count: int, kind: ir.Type = F32, lanes: int = LANES) -> list[Value]:
        return [self.constant(0, kind, lanes) for _ in range(count)]

    def spread(self, scalar: Number, lanes: int = LANES, kind: ir.Type = F32) -> Value:
        scalar = self.value(scalar, kind)
        if isinstance(scalar.ir, ir.Constant):
            return Value(self, ir.Constant(ir.VectorType(scalar.type, lanes), [scalar.ir.constant] * lanes))
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        one = self.b.insert_element(undefined, scalar.ir, ir.Constant(I32, 0))
        return Value(self, self.b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)))

    def vector(self, scalars: Sequence[Value]) -> Value:
        """Scalars as the lanes of a vector."""
        built = ir.Constant(ir.VectorType(scalars[0].type, len(scalars)), ir.Undefined)
        for i, scalar in enumerate(scalars):
            built = self.b.insert_element(built, scalar.ir, ir.Constant(I32, i))
        return Value(self, built)

    def join(self, *parts: Value) -> Value:
        """Vectors of equal size one after another."""
        left = list(parts)
        while len(left) > 1:
            n = left[0].lanes
            left = [a.take(range(2 * n), b) for a, b in zip(left[::2], left[1::2], strict=True)]
        return left[0]

    def intrinsic(self, name: str, result: ir.Type, *values: Value) -> Value:
        """A call of an LLVM intrinsic by its whole name."""
        known = self.fn.module.globals.get(name)
        known = known or ir.Function(self.fn.module, ir.FunctionType(result, [v.ir.type for v in values]), name)
        return Value(self, self.b.call(known, [v.ir for v in values]))

    def _float(self, name: str, *values: Value) -> Value:
        lanes = max(v.lanes for v in values)
        alike = [self.spread(v, lanes) if lanes and not v.lanes else v for v in values]
        suffix = f"v{lanes}f32" if lanes else "f32"
        return self.intrinsic(f"llvm.{name}.{suffix}", self.shaped(F32, lanes), *alike)

    def fma(self, a: Number, b: Number, c: Number) -> Value:
        """a * b + c, rounded once."""
        return self._float("fma", *(self.value(v, F32) for v in (a, b, c)))

    def sqrt(self, x: Value) -> Value:
        return self._float("sqrt", x)

    def rsqrt(self, x: Value) -> Value:
        """1 / sqrt(x), both correctly rounded."""
        return 1.0 / self.sqrt(x)

    def abs(self, x: Value) -> Value:
        return self._float("fabs", x)

    def round(self, x: Value) -> Value:
        """To the nearest integer, halves to even."""
        return self._float("roundeven", x)

    def maximum(self, a: Value, b: Number) -> Value:
        """a > b ? a : b; b where either is NaN."""
        a, b = a._with(b)
        return self.select(a > b, a, b)

    def minimum(self, a: Value, b: Number) -> Value:
        a, b = a._with(b)
        return self.select(a < b, a, b)

    def select(self, mask: Value, yes: Number, no: Number) -> Value:
        """Lane by lane; a scalar mask takes all of one side."""
        yes = self.value(yes, no.type if isinstance(no, Value) else F32)
        yes, no = yes._with(no)
        if mask.lanes and not yes.lanes:
            yes, no = self.spread(yes, mask.lanes), self.spread(no, mask.lanes)
        return Value(self, self.b.select(mask.ir, yes.ir, no.ir))

    def from_bf16(self, raw: Value) -> Value:
        """float32 of bfloat16 bits."""
        return (raw.to(I32, signed=False) << 16).bits(F32)

    def to_bf16(self, x: Value) -> Value:
        """bfloat16 bits of float32, rounded to nearest, halves to even; NaN stays NaN."""
        bits = x.bits(I32)
        rounded = (bits + (bits.shr(16) & 1) + 0x7FFF).shr(16)
        quiet = bits.shr(16) | 0x40
        return self.select(x._compare("==", x), rounded, quiet).to(I16)

    def round_bf16(self, x: Value) -> Value:
        """float32 x as bfloat16 keeps it."""
        return self.from_bf16(self.to_bf16(x))

    def from_f16(self, raw: Value) -> Value:
        """float32 of float16 bits, denormals too."""
        return Value(self, self.b.fpext(raw.bits(ir.HalfType()).ir, self.shaped(F32, raw.lanes)))

    def to_f16(self, x: Value) -> Value:
        """float16 bits of float32, rounded to nearest, halves to even."""
        return Value(self, self.b.fptrunc(x.ir, self.shaped(ir.HalfType(), x.lanes))).bits(I16)

    # Memory

    def view(self, pointer: ir.Value, shape: Sequence[int], dtype: Any) -> View:
        return View(self, pointer, shape, dtype)

    def stack(self, shape: Sequence[int], dtype: Any) -> View:
        """An array on the stack of this part, uninitialised; at most 64 KiB. More: ask for a workspace."""
        view = View(self, PTR, shape, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * view.itemsize
        if size > _STACK_BYTES:
            raise ValueError(f"stack: {size} bytes, at most {_STACK_BYTES}; use a workspace")
        with self.b.goto_entry_block():
            place: Any = self.b.alloca(ir.ArrayType(I8, size))
            place.align = 64
            view.pointer = self.b.bitcast(place, PTR)
        return view

    def prefetch(self, address: ir.Value, level: int = 3) -> None:
        """Asks for the cache line of an address, which need not be valid; level 3: into L1, 2: into L2."""
        kind = ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
        known = self.fn.module.globals.get("llvm.prefetch.p0")
        known = known or ir.Function(self.fn.module, kind, "llvm.prefetch.p0")
        self.b.call(known, [address, *(ir.Constant(I32, x) for x in (0, level, 1))])

    # Control

    def loop(
        self,
        start: int | Value,
        stop: int | Value,
        carried: Sequence[Value] = (),
        body: Callable[..., Sequence[Value] | None] = lambda *_: None,
        *,
        step: int = 1,
    ) -> list[Value]:
        """for i in start, start + step, ... < stop: carried = body(i, *carried); what is carried at the end. Sums that are
        carried stay in registers. No passes where start >= stop."""
        b = self.b
        start, stop = self.value(start, I64), self.value(stop, I64)
        before = b.block
        head, inside, after = (self.fn.append_basic_block(n) for n in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(start.ir, before)
        phis = []
        for value in carried:
            phi = b.phi(value.ir.type)
            phi.add_incoming(value.ir, before)
            phis.append(phi)
        b.cbranch(b.icmp_signed("<", i, stop.ir), inside, after)
        b.position_at_end(inside)
        new = list(body(Value(self, i), *(Value(self, p) for p in phis)) or ())
        if len(new) != len(phis):
            raise ValueError(f"loop: {len(phis)} values carried, the body returned {len(new)}")
        following = b.add(i, ir.Constant(I64, step))
        i.add_incoming(following, b.block)
        for phi, value in zip(phis, new, strict=True):
            phi.add_incoming(value.ir, b.block)
        b.branch(head)
        b.position_at_end(after)
        return [Value(self, p) for p in phis]

    @contextmanager
    def when(self, condition: Value, likely: bool | None = None) -> Iterator[None]:
        """A block of code that runs where the scalar `condition` holds."""
        with self.b.if_then(condition.ir, likely=likely):
            yield

    def share(self, total: int | Value, parts: int) -> tuple[Value, Value]:
        """First and one past the last of `total` things that are this part's, of `parts`."""
        total = self.value(total, I64)
        return self.part * total // parts, (self.part + 1) * total // parts

    # Functions of float32 with one order of operations, relative error below 3e-7 where results are normal

    def exp(self, x: Value) -> Value:
        """e^x: 2^n times a polynomial of degree 6 (Cephes' expf). 0 below -87.3 (no denormals), infinity above 88.7."""
        lowest, highest = -87.33654, 88.72283
        held = self.minimum(self.maximum(x, lowest), highest)
        n = self.round(held * 1.44269504)
        r = self.fma(n, -0.693359375, held)
        r = self.fma(n, 2.12194440e-4, r)
        p = self.constant(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, c)
        p = self.fma(p, r * r, r) + 1.0
        # 2^n in two factors: n = 128 is no exponent of a float32.
        half = n.to(I32) >> 1
        rest = n.to(I32) - half
        y = p * ((half + 127) << 23).bits(F32) * ((rest + 127) << 23).bits(F32)
        y = self.select(x < lowest, 0.0, y)
        y = self.select(x > highest, float("inf"), y)
        return self.select(self._nan(x), x, y)

    def _nan(self, x: Value) -> Value:
        return Value(self, self.b.fcmp_unordered("uno", x.ir, x.ir))

    def log(self, x: Value) -> Value:
        """Natural logarithm of a positive normal number (Cephes' logf)."""
        bits = x.bits(I32)
        e = (bits.shr(23) - 126).to(F32)
        m = ((bits & 0x007FFFFF) | 0x3F000000).bits(F32)  # in [0.5, 1)
        small = m < 0.70710678
        e = self.select(small, e - 1.0, e)
        m = self.select(small, m + m, m) - 1.0
        z = m * m
        p = self.constant(7.0376836292e-2)
        for c in (
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ):
            p = self.fma(p, m, c)
        y = self.fma(e, -2.12194440e-4, p * m * z)
        y = self.fma(z, -0.5, y)
        return self.fma(e, 0.693359375, m + y)

    def cos_sin(self, x: Value) -> tuple[Value, Value]:
        """Cosine and sine of |x| up to 2^22, absolute error below 1.5e-7: quarter turns taken off, then Cephes' polynomials."""
        n = self.round(x * 0.636619772)
        # Pi / 2 in two parts: the first product is exact inside a multiply-add, the second errs by 4e-15 a quarter turn.
        r = self.fma(n, 4.37113883e-8, self.fma(n, -1.57079637, x))
        z = r * r
        sine = self.fma(self.fma(self.fma(z, -1.9515295891e-4, 8.3321608736e-3), z, -1.6666654611e-1), z * r, r)
        p = self.fma(self.fma(z, 2.443315711809948e-5, -1.388731625493765e-3), z, 4.166664568298827e-2)
        cosine = self.fma(p, z * z, self.fma(z, -0.5, 1.0))
        quarter = n.to(I32)
        odd = (quarter & 1).equals(1)
        c, s = self.select(odd, sine, cosine), self.select(odd, cosine, sine)
        return self.select(((quarter + 1) & 2).equals(2), -c, c), self.select((quarter & 2).equals(2), -s, s)

    def sigmoid(self, x: Value) -> Value:
        return 1.0 / (1.0 + self.exp(-x))

    def silu(self, x: Value) -> Value:
        return x / (1.0 + self.exp(-x))

    def softplus(self, x: Value) -> Value:
        """log(1 + e^x), as max(x, 0) + log(1 + e^-|x|)."""
        t = self.exp(-self.abs(x))
        # log(1 + t) = log(u) t / (u - 1) for u = 1 + t as rounded; t itself where u is 1.
        u = 1.0 + t
        d = u - 1.0
        y = self.select(d.equals(0.0), t, self.log(u) * t / self.select(d.equals(0.0), 1.0, d))
        return self.maximum(x, 0.0) + y
