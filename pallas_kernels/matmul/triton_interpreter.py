"""Runs a Triton kernel in Triton's interpreter on NumPy arrays. The interpreter itself expects tensors of torch.

Some of its operations are replaced for the while: inline PTX, which it does not know, by a twin in jnp as in
`launch.packed`, and two of bf16, which it keeps as 16-bit integers: it multiplies matrices of them as such, and cuts
float32 off where a card rounds to the nearest.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TYPES = {"bfloat16": "bf16", "float32": "fp32", "int16": "i16", "int32": "i32"}


class _Memory:
    """An array as the interpreter wants a tensor to look: an address and a type. It is its own storage, on no device."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Memory:
        return self

    def cpu(self) -> _Memory:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Memory:
        return _Memory(self.array)

    def set_(self, storage: _Memory, *_: Any) -> None:
        self.array = storage.array

    def copy_(self, _: _Memory) -> None:
        """Results are already where they belong."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def run(
    kernel: Any,
    arguments: Sequence[jax.Array | None],
    out: jax.ShapeDtypeStruct,
    *,
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    twins: Mapping[str, Callable[..., jax.Array]],
) -> jax.Array:
    """`kernel(*arguments, output, **constants)` for every block, one after another; the output holds NaN before.

    kernel: what `triton.jit` made, calling no other such function but as the operation of a reduction.
    twins: by the text of each inline PTX, the same in jnp.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    seen_as = {tl.bfloat16: jnp.bfloat16, tl.int16: jnp.int16, tl.int32: jnp.int32}
    result = np.full(out.shape, np.nan, out.dtype)
    memory = [None if a is None else _Memory(np.ascontiguousarray(a)) for a in arguments]

    def inline(asm: str, constraints: str, values: Sequence[Any], kinds: Sequence[Any], pure: bool, pack: int) -> Any:
        got = twins[asm](*(jnp.asarray(v.data.view(seen_as[v.dtype.scalar])) for v in values))
        got = np.asarray(got)
        handle = interpreter.TensorHandle(got.view(np.uint16) if got.dtype == jnp.bfloat16 else got, kinds[0].scalar)
        return types.SimpleNamespace(get_result=lambda _: handle)

    def dot(a: Any, b: Any, total: Any, *_: Any) -> Any:
        a, b = (v.data.view(seen_as[v.dtype.scalar]).astype(np.float32) for v in (a, b))
        return interpreter.TensorHandle(a @ b + total.data, total.dtype.scalar)

    def round_off(source: Any, kind: Any) -> Any:
        return interpreter.TensorHandle(source.data.astype(jnp.bfloat16).view(np.uint16), kind.scalar)

    builder = interpreter.interpreter_builder
    builder.create_inline_asm, builder.create_dot, builder.create_fp_trunc = inline, dot, round_off
    try:
        interpreter.InterpretedFunction(kernel.fn).run(*memory, _Memory(result), grid=grid, warmup=False, **constants)
    finally:
        del builder.create_inline_asm, builder.create_dot, builder.create_fp_trunc
    return jnp.asarray(result)
