"""CPU kernels: LLVM code written from Python, compiled for the machine it runs on and called by XLA. No C compiler.

A kernel is a function that writes code with the words of `emit.Code`. Sums have one order, fixed by index, so that a row's
bits depend neither on the rows beside it nor on the number of threads, and are those of any CPU with AVX2 and FMA.

    def scale_rows(c, x, w, out):            # x [rows, n] float32, w [n] bfloat16, out [rows, n]; `View`s
        first, last = c.share(rows, PARTS)   # the rows of this part

        def row(r):
            def add(i, total):               # i: 0, 16, 32, ...; total: 16 lanes, in a register
                value = x.load(r, i, lanes=16)
                return [c.fma(value, value, total)]

            [total] = c.loop(0, n, c.zeros(1), add, step=16)
            scale = c.rsqrt(total.sum() * (1 / n) + 1e-6)
            c.loop(0, n, [], lambda i: out.store(x.load(r, i, lanes=16) * scale * w.load(i, lanes=16), r, i), step=16)

        c.loop(first, last, [], row)

    call = cpu.kernel("scale_rows", scale_rows, [x, w], [jax.ShapeDtypeStruct((rows, n), jnp.float32)], parts=PARTS)
    (y,) = call(x, w)                        # also inside jit

`parts`: the code runs once for each `c.part` in 0 .. parts - 1, at once on XLA's threads, in any order: parts must write
different memory. `before` and `after` run alone, before the first and after the last part (no `c.part`); what they pass on
goes through `workspace`: arrays that are neither arguments nor results, Views behind the results. Tails: sizes are
Python numbers, so write a second loop for what 16 does not divide, or ask for padded arrays. Values known only at run time
(lengths, pages) are int32 arrays: `lengths.integer(s)`. States updated in place: `aliases={argument: result}`; the result's
View is then the argument's memory (unless XLA had to copy it), and a kernel must not read an element that another
part may have written.

`python -c "import pallas_kernels.cpu as cpu; print(cpu.assembly(...))"`: arguments as for `kernel`; the machine code.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu import machine
from pallas_kernels.cpu.machine import KernelError, here

__all__ = ["Kernel", "KernelError", "assembly", "called", "check", "here", "install", "kernel", "object_code"]

_NAME = re.compile(r"ninfer\.(\w+)\.[0-9a-f]{32}")
_made: dict[Any, Kernel] = {}
_targets: dict[str, bytes] = {}  # name -> its object code
_lock = threading.Lock()


class Kernel:
    """A compiled kernel, called with arrays as they were described; returns a tuple of results.

    target: the name it is registered under, with a digest of all that its code depends on: LLVM's text (shapes, formats and
    FFI offsets are constants in it), the CPU's name and features, LLVM's version and how it is asked to optimise.
    """

    def __init__(self, target: str, arguments: Sequence[Any], results: Sequence[Any], kept: int, aliases: Mapping[int, int]):
        self.target, self.arguments, self.results, self.kept, self.aliases = target, arguments, results, kept, dict(aliases)

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        for i, (array, wanted) in enumerate(zip(arrays, self.arguments, strict=True)):
            if array.shape != wanted.shape or array.dtype != wanted.dtype:
                raise ValueError(
                    f"{self.target}: argument {i} is {array.dtype} {array.shape}, made for {wanted.dtype} {wanted.shape}"
                )
        call = jax.ffi.ffi_call(self.target, self.results, input_output_aliases=self.aliases)
        return tuple(call(*arrays)[: self.kept])


def kernel(
    name: str,
    build: Callable[..., None],
    arguments: Sequence[Any],
    results: Sequence[Any],
    *,
    parts: int = 1,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    workspace: Sequence[Any] = (),
    aliases: Mapping[int, int] | None = None,
) -> Kernel:
    """The kernel that `build(code, *views)` writes, for arrays shaped like `arguments`, `results` and `workspace`
    (anything with shape and dtype). Compiled once for the same code; kept on disk.

    KernelError, one line that says what to choose instead: a CPU without AVX2 and FMA, no LLVM, another FFI.
    """
    arguments, results, workspace = (
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in group] for group in (arguments, results, workspace)
    )
    made_of = _identity((name, build, arguments, results, parts, before, after, workspace, sorted((aliases or {}).items())))
    if made_of in _made:
        return _made[made_of]
    source, symbol = _source(name, build, arguments, [*results, *workspace], parts, before, after, aliases or {})
    target = f"ninfer.{symbol}.{machine.digest(source)}"
    with _lock:
        if target not in _targets:
            _register(target, symbol, machine.object_code(source))
    # The same code may serve other shapes: a leading axis that nothing depends on is not in it.
    made = Kernel(target, arguments, [*results, *workspace], len(results), aliases or {})
    if made_of is not None:
        _made[made_of] = made
    return made


def check() -> None:
    """KernelError where `kernel` could make none: what the CPU lacks, LLVM or XLA."""
    machine.check()
    from pallas_kernels.cpu import xla_ffi

    xla_ffi.layout()


def _identity(x: Any) -> Any:
    """A key for the same value another time: of layers alike, one need be written (34 ms each, measured on 2 cores, AVX-512).
    None where a function may hold more than its name says."""
    if isinstance(x, functools.partial):
        x = (x.func, *x.args, *sorted(x.keywords.items()))
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, np.dtype(x.dtype).name
    if isinstance(x, (tuple, list)):
        parts = tuple(_identity(y) for y in x)
        return None if any(part is None for part in parts) else parts
    if getattr(x, "__closure__", None) or getattr(x, "__self__", None) or x.__hash__ is None:
        return None
    return type(x), x


def called(program: str) -> list[str]:
    """The targets that an optimised program calls, by its text (`Compiled.as_text()`), sorted."""
    return sorted({m[0] for m in _NAME.finditer(program)})


def object_code(target: str) -> bytes:
    """The machine code that a target of this process stands for; KeyError where there is none of that name."""
    return _targets[target]


def install(target: str, code: bytes) -> None:
    """Registers a target with the `object_code` that another process had for it, so that a program compiled there can call it.

    Nothing is compiled. The code runs with this process' rights: take it only from where programs are taken from, its digest
    checked. ValueError for a name that is no target's; RuntimeError where kernels cannot run here.
    """
    if not (named := _NAME.fullmatch(target)):
        raise ValueError(f"{target!r} is no CPU kernel's name")
    with _lock:
        if target not in _targets:
            _register(target, named[1], code)


def _register(target: str, symbol: str, code: bytes) -> None:
    address = machine.load(symbol, code)
    capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address))
    jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    _targets[target] = code


def assembly(name: str, build: Callable[..., None], arguments: Sequence[Any], results: Sequence[Any], **options: Any) -> str:
    """The machine code of a kernel, as text; arguments as for `kernel`."""
    shapes = [*results, *options.pop("workspace", ())]
    more = [options.pop(k, d) for k, d in (("parts", 1), ("before", None), ("after", None), ("aliases", {}))]
    return machine.assembly(_source(name, build, list(arguments), shapes, *more)[0])


def _source(name, build, arguments, results, parts, before, after, aliases) -> tuple[str, str]:
    """LLVM's text of the kernel's module, and its symbol."""
    machine.here()  # says in one line what is missing
    import llvmlite.ir as ir

    from pallas_kernels.cpu import xla_ffi
    from pallas_kernels.cpu.emit import I64, PTR, Code, Value, View

    symbol = re.sub(r"\W", "_", name)
    module = ir.Module(symbol)
    module.triple = machine.here().triple
    shapes = [*arguments, *results]
    shared = {*aliases, *(len(arguments) + r for r in aliases.values())}

    def function(write: Callable[..., None], suffix: str, numbered: bool) -> ir.Function:
        fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * numbered + [PTR] * len(shapes)), symbol + suffix)
        fn.linkage = "internal"
        fn.attributes.add("noinline")
        pointers = fn.args[numbered:]
        for i, pointer in enumerate(pointers):
            if i not in shared:
                pointer.add_attribute("noalias")
        c = Code(fn)
        if numbered:
            c.part = Value(c, fn.args[0])
        write(c, *(View(c, p, s.shape, np.dtype(s.dtype)) for p, s in zip(pointers, shapes, strict=True)))
        c.b.ret_void()
        return fn

    part = function(build, ".part", True)
    first = before and function(before, ".before", False)
    last = after and function(after, ".after", False)
    xla_ffi.handler(module, symbol, len(arguments), len(results), parts, part, first, last)
    return str(module), symbol
