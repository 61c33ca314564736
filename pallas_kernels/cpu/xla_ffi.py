"""All that knows the C structures of XLA's typed FFI (`xla/ffi/api/c_api.h`): the handler around a kernel's parts.

Offsets are read from the header that the installed jaxlib ships (`jax.ffi.include_dir()`), so a field that moved is found
and one that went is refused by name. Known: API 0.3 (jax 0.10.2) and 0.4 (jax 0.11.2).

A handler runs `before` once on XLA's thread, then the parts on that thread and on XLA's own pool
(`XLA_FFI_ThreadPool_Schedule`), each taking the next part from a counter. Nobody waits: who finishes the last part runs
`after` and completes the call's future, on which XLA goes on. A task of the pool that comes too late finds the counter
at its end and touches nothing but the context, which the last user frees.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import llvmlite.ir as ir

from pallas_kernels.cpu.machine import INSTEAD, KernelError

KNOWN = ((0, 3), (0, 4))
_METADATA, _FAILED_PRECONDITION = 1, 9  # XLA_FFI_Extension_Metadata, XLA_FFI_Error_Code_FAILED_PRECONDITION
_FUNCTIONS = (
    "Error_Create",
    "Error_Destroy",
    "Future_Create",
    "Future_SetAvailable",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
)
_SIZES = {"size_t": 8, "int64_t": 8, "int": 4, "int32_t": 4, "uint32_t": 4, "XLA_FFI_Handler_Traits": 4}
# Flush denormals to zero and read them as zero, round to nearest, no exceptions: XLA's own mode, set for every part so
# that its bits do not depend on the thread that runs it.
_MXCSR = 0x9FC0

I1, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
PTR = I8.as_pointer()
NULL = ir.Constant(PTR, None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """version: (major, minor); offsets: bytes by "Structure.field"; sizes: bytes by structure."""

    version: tuple[int, int]
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]

    def at(self, field: str) -> int:
        if field not in self.offsets:
            raise KernelError(
                f"XLA FFI {self.version[0]}.{self.version[1]} has no field {field}: CPU kernels cannot be called; {INSTEAD}"
            )
        return self.offsets[field]


@functools.cache
def layout() -> Layout:
    """The structures of the installed jaxlib. KernelError for an API version that this file does not know."""
    return read_layout((Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text())


def read_layout(header: str) -> Layout:
    """The structures that a `c_api.h` declares."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.S)
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    told = tuple(int(m.group(1)) for m in found if m)
    version = next((known for known in KNOWN if known == told), None)
    if version is None:
        known = ", ".join(f"{a}.{b}" for a, b in KNOWN)
        raise KernelError(f"XLA FFI {'.'.join(map(str, told))}: CPU kernels know {known}; {INSTEAD} or install a supported jax")
    enums = {name: 4 for name in re.findall(r"\}\s*(XLA_FFI_\w+);", text) if re.search(rf"enum \{{[^}}]*\}}\s*{name};", text)}
    offsets, sizes, aligns = {}, dict(_SIZES | enums), {}
    for name, body in re.findall(r"struct (XLA_FFI_\w+) \{([^}]*)\}", text):
        at, short, most = 0, name.removeprefix("XLA_FFI_"), 1
        for field in filter(None, (f.strip() for f in body.split(";"))):
            if m := re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", field):
                kind, field_name, size = "", m.group(1).removeprefix("XLA_FFI_"), 8
            elif m := re.search(r"\(\*(\w+)\)", field):
                kind, field_name, size = "", m.group(1), 8
            else:
                named = re.fullmatch(r"(?:const )?(?:struct )?([\w*\s]+?[\s*])(\w+)", field, flags=re.S)
                if named is None:
                    raise KernelError(f"XLA's FFI header of this jaxlib has a field that is not understood ({field!r}): {INSTEAD}")
                kind, field_name = named.groups()
                size = 8 if "*" in kind else sizes.get(kind.strip(), 0)
            align = aligns.get(kind.strip(), min(size, 8)) or 8
            at = -(-at // align) * align
            offsets[f"{short}.{field_name}"] = at
            at, most = at + size, max(most, align)
        sizes[name], aligns[name] = -(-at // most) * most, most
    return Layout(version, offsets, {k.removeprefix("XLA_FFI_"): v for k, v in sizes.items()})


def field(b: Any, base: ir.Value, offset: int, kind: ir.Type = PTR) -> ir.Value:
    """A pointer to the `kind` at `base` + `offset`."""
    return b.bitcast(b.gep(base, [ir.Constant(I64, offset)]), kind.as_pointer())


def handler(
    module: ir.Module,
    name: str,
    arguments: int,
    results: int,
    parts: int,
    part: ir.Function,
    before: ir.Function | None = None,
    after: ir.Function | None = None,
) -> None:
    """Adds to `module` the function `name`, an `XLA_FFI_Handler*`.

    part(i64, buffers...), before(buffers...) and after(buffers...) are functions without a result; buffers are the data
    of the arguments, then of the results.
    """
    _Handler(module, name, arguments, results, parts, part, before, after).emit()


class _Handler:
    def __init__(self, module, name, arguments, results, parts, part, before, after):
        self.module, self.name, self.counts, self.parts = module, name, (arguments, results), parts
        self.part, self.before, self.after = part, before, after
        self.layout = layout()
        # The context: next part, unfinished parts, users, api, future, then the buffers' data.
        self.buffers = arguments + results
        self.context_bytes = 8 * (5 + self.buffers)

    NEXT, LEFT, USERS, API, FUTURE, DATA = 0, 8, 16, 24, 32, 40

    def emit(self) -> None:
        work = self._work()
        fn = ir.Function(self.module, ir.FunctionType(PTR, [PTR]), self.name)
        b = ir.IRBuilder(fn.append_basic_block("entry"))
        at, frame = self.layout.at, fn.args[0]
        inline_context = self._alloca(b, self.context_bytes)
        scratch = self._alloca(b, 128)
        self._metadata(b, frame)
        api = b.load(field(b, frame, at("CallFrame.api")))
        size = b.load(field(b, frame, at("CallFrame.struct_size"), I64))
        # `attrs` is the last field that the header's own size counts.
        with b.if_then(b.icmp_unsigned("<", size, ir.Constant(I64, at("CallFrame.attrs"))), likely=False):
            b.ret(self._error(b, api, scratch))
        tables = [b.load(field(b, frame, at(f"CallFrame.{t}") + at(f"{s}.{t}"))) for t, s in (("args", "Args"), ("rets", "Rets"))]
        data = []
        for table, count in zip(tables, self.counts, strict=True):
            for i in range(count):
                data.append(b.load(field(b, b.load(field(b, table, 8 * i)), at("Buffer.data"))))
        if self.parts == 1:
            self._fill(b, inline_context, api, NULL, data, 1)
            b.call(work, [inline_context])
            b.ret(NULL)
            return
        execution = b.load(field(b, frame, at("CallFrame.ctx")))
        helpers = self._helpers(b, api, execution, scratch)
        alone = b.icmp_signed("<=", helpers, ir.Constant(I64, 0))
        with b.if_then(alone):
            self._fill(b, inline_context, api, NULL, data, 1)
            b.call(work, [inline_context])
            b.ret(NULL)
        future = self._future(b, api, scratch)
        malloc = self._external("malloc", PTR, [I64])
        context = b.call(malloc, [ir.Constant(I64, self.context_bytes)])
        self._fill(b, context, api, future, data, b.add(helpers, ir.Constant(I64, 1)))
        self._schedule(fn, b, api, execution, context, work, helpers, scratch)
        b.call(work, [context])
        b.store(future, field(b, frame, at("CallFrame.future")))
        b.ret(NULL)

    def _work(self) -> ir.Function:
        """`void work(context)`: takes parts until none is left; also a task of the pool."""
        fn = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [PTR]), self.name + ".work")
        fn.linkage = "internal"
        b = ir.IRBuilder(fn.append_basic_block("entry"))
        context = fn.args[0]
        mode = self._alloca(b, 4)
        store, load = (self._external(f"llvm.x86.sse.{x}mxcsr", ir.VoidType(), [PTR]) for x in ("st", "ld"))
        b.call(store, [mode])
        old = b.load(b.bitcast(mode, I32.as_pointer()))
        ours = self._alloca(b, 4)
        b.store(ir.Constant(I32, _MXCSR), b.bitcast(ours, I32.as_pointer()))
        b.call(load, [ours])
        future = b.load(field(b, context, self.FUTURE))
        api = b.load(field(b, context, self.API))
        data = [b.load(field(b, context, self.DATA + 8 * i)) for i in range(self.buffers)]
        take, run, done = (fn.append_basic_block(n) for n in ("take", "run", "done"))
        b.branch(take)
        b.position_at_end(take)
        one = ir.Constant(I64, 1)
        mine = b.atomic_rmw("add", field(b, context, self.NEXT, I64), one, "monotonic")
        b.cbranch(b.icmp_unsigned("<", mine, ir.Constant(I64, self.parts)), run, done)
        b.position_at_end(run)
        b.call(self.part, [mine, *data])
        left = b.atomic_rmw("sub", field(b, context, self.LEFT, I64), one, "acq_rel")
        with b.if_then(b.icmp_unsigned("==", left, one)):
            if self.after is not None:
                b.call(self.after, data)
            with b.if_then(b.icmp_unsigned("!=", future, NULL)):
                args = self._alloca(b, 24)
                self._request(b, args, "Future_SetAvailable", {"future": future})
                self._call(b, api, "Future_SetAvailable", args)
        b.branch(take)
        b.position_at_end(done)
        users = b.atomic_rmw("sub", field(b, context, self.USERS, I64), one, "acq_rel")
        last = b.and_(b.icmp_unsigned("==", users, one), b.icmp_unsigned("!=", future, NULL))
        with b.if_then(last):
            b.call(self._external("free", ir.VoidType(), [PTR]), [context])
        b.store(old, b.bitcast(mode, I32.as_pointer()))
        b.call(load, [mode])
        b.ret_void()
        return fn

    def _fill(self, b, context, api, future, data: Sequence[ir.Value], users) -> None:
        if isinstance(users, int):
            users = ir.Constant(I64, users)
        for at, value in ((self.NEXT, ir.Constant(I64, 0)), (self.LEFT, ir.Constant(I64, self.parts)), (self.USERS, users)):
            b.store(value, field(b, context, at, I64))
        b.store(api, field(b, context, self.API))
        b.store(future, field(b, context, self.FUTURE))
        for i, pointer in enumerate(data):
            b.store(pointer, field(b, context, self.DATA + 8 * i))
        if self.before is not None:
            b.call(self.before, data)

    def _metadata(self, b, frame) -> None:
        """On registration XLA asks, by an extension, for the API version that the handler was made for."""
        at = self.layout.at
        extension = b.load(field(b, frame, at("CallFrame.extension_start")))
        base = "InternalExtension" if "InternalExtension.type" in self.layout.offsets else "Extension_Base"
        with b.if_then(b.icmp_unsigned("!=", extension, NULL), likely=False):
            kind = b.load(field(b, extension, at(f"{base}.type"), I32))
            with b.if_then(b.icmp_unsigned("==", kind, ir.Constant(I32, _METADATA))):
                version = b.load(field(b, extension, at("Metadata_Extension.metadata")))
                for number, name in zip(self.layout.version, ("major_version", "minor_version"), strict=True):
                    place = at("Metadata.api_version") + at(f"Api_Version.{name}")
                    b.store(ir.Constant(I32, number), field(b, version, place, I32))
                b.ret(NULL)

    def _helpers(self, b, api, execution, scratch) -> ir.Value:
        """Tasks to schedule beside the calling thread; 0 where there is no pool."""
        number = b.bitcast(b.gep(scratch, [ir.Constant(I64, 64)]), I64.as_pointer())
        b.store(ir.Constant(I64, 1), number)
        out = b.bitcast(number, PTR)
        self._request(b, scratch, "ThreadPool_NumThreads", {"ctx": execution, "num_threads": out})
        self._destroy(b, api, self._call(b, api, "ThreadPool_NumThreads", scratch), scratch)
        threads = b.load(number)
        most = ir.Constant(I64, self.parts)
        fewer = b.select(b.icmp_signed("<", threads, most), threads, most)
        return b.sub(fewer, ir.Constant(I64, 1))

    def _future(self, b, api, scratch) -> ir.Value:
        self._request(b, scratch, "Future_Create", {"future": NULL})
        error = self._call(b, api, "Future_Create", scratch)
        with b.if_then(b.icmp_unsigned("!=", error, NULL), likely=False):
            b.ret(error)
        return b.load(field(b, scratch, self.layout.at("Future_Create_Args.future")))

    def _schedule(self, fn, b, api, execution, context, work, helpers, scratch) -> None:
        loop, after = fn.append_basic_block("schedule"), fn.append_basic_block("scheduled")
        before = b.block
        b.branch(loop)
        b.position_at_end(loop)
        i = b.phi(I64)
        i.add_incoming(ir.Constant(I64, 0), before)
        self._request(b, scratch, "ThreadPool_Schedule", {"ctx": execution, "task": b.bitcast(work, PTR), "data": context})
        error = self._call(b, api, "ThreadPool_Schedule", scratch)
        with b.if_then(b.icmp_unsigned("!=", error, NULL), likely=False):
            b.atomic_rmw("sub", field(b, context, self.USERS, I64), ir.Constant(I64, 1), "acq_rel")
            self._destroy(b, api, error, scratch)
        following = b.add(i, ir.Constant(I64, 1))
        i.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, helpers), loop, after)
        b.position_at_end(after)

    def _error(self, b, api, scratch) -> ir.Value:
        text = b"XLA's FFI call frame is smaller than jaxlib's header says: choose kernels='xla'\0"
        message: Any = ir.GlobalVariable(self.module, ir.ArrayType(I8, len(text)), self.name + ".error")
        message.global_constant, message.linkage = True, "internal"
        message.initializer = ir.Constant(message.value_type, bytearray(text))
        self._request(b, scratch, "Error_Create", {"message": b.bitcast(message, PTR)})
        place = field(b, scratch, self.layout.at("Error_Create_Args.errc"), I32)
        b.store(ir.Constant(I32, _FAILED_PRECONDITION), place)
        return self._call(b, api, "Error_Create", scratch)

    def _destroy(self, b, api, error, scratch) -> None:
        with b.if_then(b.icmp_unsigned("!=", error, NULL), likely=False):
            self._request(b, scratch, "Error_Destroy", {"error": error})
            self._call(b, api, "Error_Destroy", scratch)

    def _request(self, b, place, function: str, fields: Mapping[str, ir.Value]) -> None:
        structure = function + "_Args"
        b.store(ir.Constant(I64, self.layout.sizes[structure]), field(b, place, self.layout.at(f"{structure}.struct_size"), I64))
        b.store(NULL, field(b, place, self.layout.at(f"{structure}.extension_start")))
        for name, value in fields.items():
            b.store(value, field(b, place, self.layout.at(f"{structure}.{name}")))

    def _call(self, b, api, function: str, request) -> ir.Value:
        assert function in _FUNCTIONS
        kind = ir.FunctionType(PTR, [PTR]).as_pointer()
        return b.call(b.load(field(b, api, self.layout.at(f"Api.{function}"), kind)), [request])

    def _alloca(self, b, size: int) -> ir.Value:
        """Stack of the function, wherever it is asked for."""
        with b.goto_entry_block():
            place = b.alloca(ir.ArrayType(I8, size))
            place.align = 16
            return b.bitcast(place, PTR)

    def _external(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments), name)
