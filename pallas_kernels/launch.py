"""The one door to Pallas' GPU backend: launching a kernel, masked memory access, dot products, the platform switch.

No other module of the package imports `jax.experimental.pallas.triton`, so a port to another backend is this file and
the kernel bodies. Upstream has deprecated that backend; JAX is pinned below the version that may drop it.

A kernel is launched in one of two ways: compiled for a GPU, or interpreted on any device when the caller asks for it
(tests and the lab do). Nothing is ever interpreted by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as _triton

# Said at every lowering from jax 0.11.2 on; the pin in the project's metadata is the answer to it.
UPSTREAM_WARNING = r".*Pallas Triton.*deprecated.*"

_log = logging.getLogger(__name__)

# How XLA compiles for a card, whether the card is there or not: what was looked through without one is what runs on it.
COMPILER_OPTIONS: Mapping[str, Any] = {
    # Candidates cannot be timed without a device, and choices by the clock would differ from start to start.
    "xla_gpu_autotune_level": 0,
    # XLA would compute small things again to save memory that nothing else wants: what has to fit is planned for.
    "xla_disable_hlo_passes": "rematerialization",
}


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Sequence[int],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Callable[..., Any]:
    """`pl.pallas_call` for the GPU backend.

    name: the kernel's name in profiles and in the lab.
    grid: blocks along at most three axes. The first axis runs fastest.
    in_specs, out_specs: may describe whole arrays; what the kernel loads and computes must have power-of-two sizes.
    num_warps, num_stages: warps a block, and the depth of the loads that run ahead of a loop.
    aliases: input position -> output position that shares its buffer.
    Tails are the kernel's own: use `load` and `store` with a mask, blocks that overhang an array are not masked.
    """
    if len(grid) > 3:
        raise ValueError(f"{name}: grid {tuple(grid)} has more than three axes")
    if not is_power_of_two(num_warps):
        raise ValueError(f"{name}: num_warps {num_warps} must be a power of two")
    return pl.pallas_call(
        kernel,
        name=name,
        grid=tuple(grid),
        in_specs=list(in_specs),
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        # Without these, some versions of JAX hand the kernel to another backend.
        compiler_params=_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )


def whole(array: Any) -> pl.BlockSpec:
    """Every block sees all of `array` (nothing is copied: a GPU kernel gets the pointer)."""
    zeros = (0,) * len(array.shape)
    return pl.BlockSpec(array.shape, lambda *_: zeros)


def load(ref: Any, index: Any, mask: jax.Array | None = None, other: Any = 0) -> jax.Array:
    """`ref[index]`, with `other` where `mask` is false. Nothing is read there, on a GPU or interpreted.

    index: as for indexing; `pl.ds` for ranges, integer arrays for gathers.
    """
    value = _triton.load(ref.at[_arrays(index)], mask=mask, other=None if mask is None else other)
    _check_size(value.shape)
    return value


def store(ref: Any, index: Any, value: jax.Array, mask: jax.Array | None = None) -> None:
    """`ref[index] = value` where `mask` is true."""
    _check_size(value.shape)
    _triton.store(ref.at[_arrays(index)], value.astype(ref.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array, *, exact: bool = False) -> jax.Array:
    """Matrix product of 2-D blocks on tensor cores: float32 sums, or int32 sums of int8.

    exact: multiply float32 blocks in full float32 (several times slower); they are rounded to TF32 otherwise.
    """
    if a.dtype != b.dtype:
        raise ValueError(f"dot: {a.dtype} and {b.dtype} must be the same type")
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else jnp.float32,
    )


# `lop3.b32` tables for the PTX of `packed`: (a & b) | c, (a & b) ^ c, and a ? b : c bit by bit.
AND_OR, AND_XOR, SELECT = 0xEA, 0x6A, 0xCA


def packed(asm: str, twin: Callable[..., jax.Array], *args: jax.Array, dtype: Any, interpret: bool, pack: int = 2) -> jax.Array:
    """PTX on `pack` neighbouring elements at a time, as 32-bit registers: `$0` the result, `$1`... the arguments.

    It must act on each element alone: which elements are neighbours is the compiler's choice.

    The compiler does not find such packed forms by itself. The interpreter knows no PTX and runs `twin(*args)`, which
    must say the same in jnp.
    """
    if interpret:
        return twin(*args)
    shapes = {a.shape for a in args}
    if len(shapes) != 1:
        raise ValueError(f"packed: arguments of shapes {sorted(shapes)}")
    registers = sum(pack * jnp.dtype(a.dtype).itemsize // 4 for a in args)
    constraints = ",".join(["=r"] + ["r"] * registers)
    out = jax.ShapeDtypeStruct(args[0].shape, dtype)
    [result] = _triton.elementwise_inline_asm(asm, args=list(args), constraints=constraints, pack=pack, result_shape_dtypes=[out])
    return result


def by_platform(*args: Any, impl: str = "auto", unfit: str | Mapping[str, str] = "", **forms: Callable[..., Any] | None) -> Any:
    """`forms[impl](*args)`: the forms of an op by name, `xla` and mostly `pallas` (a CUDA GPU's) among them; `cpu` is compiled
    by `pallas_kernels.cpu`. A form that is None is not there.

    `auto` takes Pallas on a CUDA GPU and XLA on a CPU, or what `lowering_for` prefers where the op has it; a name insists.
    unfit: why there is no kernel for these shapes, by form or, as a string, for `pallas`. `auto` then takes XLA's form, and
    says so in the log where another would have run; the name refuses (ValueError, also for a name that is no form).

    The choice is made when the program is lowered, so that compiling for a card on a machine without one picks what
    the card will run; within `lowering_for` it is known before, and the other forms are not even traced.
    """
    there = {name: form for name, form in forms.items() if form is not None}
    unfit = {"pallas": unfit} if isinstance(unfit, str) else unfit
    if impl != "auto":
        if impl not in there:
            raise ValueError(f"impl: {impl!r} is not one of auto, {', '.join(there)}")
        if unfit.get(impl):
            raise ValueError(unfit[impl])
        return there[impl](*args)
    platform, preferred = _lowering.get()
    if preferred in there:
        wanted = preferred
    elif platform is None:
        wanted = "pallas" if "pallas" in there else "xla"
    else:
        wanted = "xla" if platform == "cpu" or "pallas" not in there else "pallas"
    if unfit.get(wanted):
        if platform is not None or jax.default_backend() == "gpu":
            _log.warning("XLA's form runs instead of a kernel (%s): %s", wanted, unfit[wanted])
        wanted = "xla"
    if platform is None and wanted == "pallas":
        return jax.lax.platform_dependent(*args, cuda=there["pallas"], default=there["xla"])
    return there[wanted](*args)


_lowering: contextvars.ContextVar[tuple[str | None, str | None]] = contextvars.ContextVar("lowering", default=(None, None))


@contextlib.contextmanager
def lowering_for(platform: str, prefer: str | None = None) -> Iterator[None]:
    """A context in which whatever is traced will be compiled for `platform`, "cpu" or "cuda"; `auto` takes the form `prefer`
    of every op that has it."""
    token = _lowering.set((platform, prefer))
    try:
        with quiet():
            yield
    finally:
        _lowering.reset(token)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lowering without upstream's deprecation; outside of it the process hears all its warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=UPSTREAM_WARNING, category=DeprecationWarning)
        yield


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, ..."""
    return n > 0 and n & (n - 1) == 0


def _arrays(index: Any) -> Any:
    """The interpreter of jax 0.10 trips over Python integers among the indices."""
    if isinstance(index, tuple):
        return tuple(_arrays(i) for i in index)
    return jnp.int32(index) if isinstance(index, int) else index


def _check_size(shape: tuple[int, ...]) -> None:
    # The interpreter would accept any size, and the GPU compiler refuse it later.
    if not all(is_power_of_two(n) for n in shape):
        raise ValueError(f"kernel value {shape}: every size must be a power of two")
