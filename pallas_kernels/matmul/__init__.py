"""Projections of a few decode rows or of a prefill chunk, float32 sums.

`linear(x, w)` takes plain weights, `quantised_linear(x, weight, ...)` weights of 4 or 8 bits (`quantised`) and what
surrounds a projection in the model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.matmul import cpu, cpu_prefill, cpu_quantised, head, kernel, pair, prefill, reference, triton_kernel
from pallas_kernels.matmul.quantised import COLUMNS, QuantisedWeight, concatenate, dequantise, pack, quantise
from pallas_kernels.norms import rms_norm

__all__ = [
    "QuantisedWeight",
    "concatenate",
    "cpu_norm",
    "dequantise",
    "head_candidates",
    "linear",
    "pack",
    "quantise",
    "quantised_linear",
    "quantised_linear_pair",
]

# Up to this many rows a call is a decode step and is padded to whole tensor-core tiles on a GPU: the same shape for
# every row count means the same kernel and the same order of sums, so drafting cannot flip a near tie.
DECODE_ROWS = 32
_TILE = 16
HEAD_ROWS = PAIR_ROWS = kernel.ROWS  # most rows of `head_candidates` and of `quantised_linear_pair`


def linear(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    out_dtype: jnp.dtype | None = None,
    impl: str = "auto",
) -> jax.Array:
    """x `[rows, in]` @ w `[out, in]` transposed -> `[rows, out]` in `out_dtype` (default: x's dtype), float32 sums.

    Float32 inputs are multiplied in full float32, never TF32. norm: weight `[in]` of a zero-centred RMSNorm of x, see
    `norms.rms_norm`. swiglu: the columns are gate | up; the result is silu(gate) up, `[rows, out / 2]`. residual: `[rows, out
    or out / 2]`, added to the result.

    impl: `auto` is XLA; `cpu`, for up to 32 rows, gives a row the same bits whatever the number of rows.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"linear: x {x.shape} and w {w.shape} must be [rows, in] and [out, in] with the same in")
    out_dtype = jnp.dtype(out_dtype or x.dtype)

    def xla(x, w, norm, residual):
        x = x if norm is None else rms_norm(x, norm, eps)
        many = x.shape[0] > DECODE_ROWS
        y = _matrix(x, w) if many else jax.lax.platform_dependent(x, w, cpu=_few_rows, default=_padded_tile)
        y = y.astype(out_dtype)
        if swiglu:
            gate, up = jnp.split(y, 2, axis=-1)
            y = jax.nn.silu(gate) * up
        return y if residual is None else residual + y

    def on_cpu(x, w, norm, residual):
        return cpu.linear(x, w, norm, residual, eps=eps, swiglu=swiglu, out_dtype=out_dtype)

    few = on_cpu if x.shape[0] <= DECODE_ROWS else None
    return launch.by_platform(x, w, norm, residual, xla=xla, cpu=few, impl=impl)


cpu_norm = cpu.rms_norm


def _matrix(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _few_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    # At one row a matrix-vector product over [out, in] is what XLA's CPU backend does best.
    if x.shape[0] == 1:
        return jnp.dot(w, x[0], preferred_element_type=jnp.float32)[None]
    return _matrix(x, w)


def _padded_tile(x: jax.Array, w: jax.Array) -> jax.Array:
    rows = -(-x.shape[0] // _TILE) * _TILE
    return _matrix(jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))), w)[: x.shape[0]]


def quantised_linear(
    x: jax.Array,
    weight: QuantisedWeight,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    activations: str = "bf16",
    out_dtype: jnp.dtype = jnp.bfloat16,
    impl: str = "auto",
) -> jax.Array:
    """x `[rows, K]` bf16 @ weight `[K, N]` -> `[rows, N]` in `out_dtype`, float32 sums; the parts around it in one launch.

    x and residual may be float32 too, which a GPU's kernels do not take.
    norm: weight w `[K]` bf16 of a zero-centred RMSNorm of x: x / sqrt(mean(x^2) + eps) (1 + w) is what is multiplied.
    swiglu: the columns are gate | up; the result is silu(gate) up, `[rows, N / 2]`.
    residual: `[rows, N or N / 2]`, added to the result before it is rounded.
    activations: `int8` multiplies in 8 bits on a GPU, activations rounded per row and group; for more than 16 rows only,
        where tensor cores and not memory set the pace.
    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas` and `xla` insist. `triton` insists on the kernel compiled
        by Triton itself, for up to 16 rows; RuntimeError where the extra `triton` is not installed. `cpu` reads the codes as
        they are: up to 32 rows with activations rounded to 16 bits a group (`cpu_quantised`), more of them with the weight
        expanded some columns at a time (`cpu_prefill`); RuntimeError where LLVM is missing.

    Up to 16 rows (`cpu`: 32), a row's result has the same bits whatever the number of rows. ValueError for shapes, types or
    options that do not fit.
    """
    _check(x, weight, norm, residual, swiglu, activations)
    out_dtype = jnp.dtype(out_dtype)

    def pallas(x, weight, norm, residual):
        if x.shape[0] <= kernel.ROWS:
            return kernel.decode(x, weight, norm, residual, eps=eps, swiglu=swiglu, out_dtype=out_dtype)
        if norm is not None:
            x = _normalise(x, norm, eps)
        return prefill.prefill(x, weight, residual, route=activations, swiglu=swiglu, out_dtype=out_dtype)

    def xla(x, weight, norm, residual):
        return reference.quantised_linear(x, weight, norm, residual, eps=eps, swiglu=swiglu, out_dtype=out_dtype)

    def triton(x, weight, norm, residual):
        return triton_kernel.decode(x, weight, norm, residual, eps=eps, swiglu=swiglu, out_dtype=out_dtype)

    def on_cpu(x, weight, norm, residual):
        form = cpu_quantised if x.shape[0] <= DECODE_ROWS else cpu_prefill
        return form.quantised_linear(x, weight, norm, residual, eps=eps, swiglu=swiglu, out_dtype=out_dtype)

    forms: Any = {"pallas": pallas, "xla": xla, "triton": triton, "cpu": on_cpu}
    return launch.by_platform(x, weight, norm, residual, **forms, impl=impl, unfit=_unfit(x, weight, swiglu))


def quantised_linear_pair(
    x: jax.Array,
    wide: QuantisedWeight,
    narrow: QuantisedWeight,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    out_dtype: jnp.dtype = jnp.bfloat16,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`quantised_linear` of x `[1..16, K]` with each of two weights `[K, N1]` and `[K, N2]`, one launch on a GPU.

    Bits and groups may differ. The second should have few columns: a card does them beside the first. norm, eps,
    out_dtype, impl (without `triton`) as for `quantised_linear`. ValueError for shapes or types that do not fit.
    """
    for weight in (wide, narrow):
        _check(x, weight, norm, None, False, "bf16")
    if x.shape[0] > PAIR_ROWS:
        raise ValueError(f"quantised_linear_pair: {x.shape[0]} rows, at most {PAIR_ROWS}")
    out_dtype = jnp.dtype(out_dtype)

    def pallas(x, wide, narrow, norm):
        return pair.decode(x, wide, narrow, norm, eps=eps, out_dtype=out_dtype)

    def xla(x, wide, narrow, norm):
        return tuple(reference.quantised_linear(x, w, norm, eps=eps, out_dtype=out_dtype) for w in (wide, narrow))

    def on_cpu(x, wide, narrow, norm):
        return tuple(cpu_quantised.quantised_linear(x, w, norm, None, eps=eps, out_dtype=out_dtype) for w in (wide, narrow))

    forms: Any = {"pallas": pallas, "xla": xla, "cpu": on_cpu}
    return launch.by_platform(x, wide, narrow, norm, **forms, impl=impl, unfit=_unfit(x, wide, False))


def head_candidates(
    x: jax.Array, weight: QuantisedWeight, *, k: int, valid: int, impl: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of the first `valid` columns of x `[1..16, K]` @ weight, float32 `[rows, k]` falling, and their
    int32 ids, equals by rising id; without the whole product in memory unless the pick needs it (`head`).

    k: 1 to 64. impl as for `quantised_linear`. ValueError for shapes, types or k that do not fit.
    """
    _check(x, weight, None, None, False, "bf16")
    if x.shape[0] > kernel.ROWS or not 1 <= k <= min(head.MOST, valid) or valid > weight.shape[1]:
        raise ValueError(
            f"head_candidates: {x.shape[0]} rows, k {k}, valid {valid}: at most {kernel.ROWS} rows, "
            f"k from 1 to {head.MOST}, valid at most {weight.shape[1]}"
        )

    def pallas(x, weight):
        if k > 1:
            return head.top_k(x, weight, k, valid=valid)
        ids, values = head.argmax(x, weight, valid=valid)
        return values[:, None], ids[:, None]

    def xla(x, weight):
        logits = reference.quantised_linear(x, weight, None, None, out_dtype=jnp.float32)
        return _top(logits[:, :valid], k)

    def on_cpu(x, weight):
        return _top(cpu_quantised.quantised_linear(x, weight, None, None, out_dtype=jnp.float32)[:, :valid], k)

    forms: Any = {"pallas": pallas, "xla": xla, "cpu": on_cpu}
    return launch.by_platform(x, weight, **forms, impl=impl, unfit=_unfit(x, weight, False))


def _top(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    if k == 1:
        ids = jnp.argmax(logits, axis=1, keepdims=True).astype(jnp.int32)
        return jnp.take_along_axis(logits, ids, 1), ids
    values, ids = jax.lax.top_k(logits, k)
    return values, ids.astype(jnp.int32)


def _normalise(x: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=1, keepdims=True) + eps) * (1 + norm.astype(jnp.float32))
    return h.astype(x.dtype)


def _check(
    x: jax.Array, weight: QuantisedWeight, norm: jax.Array | None, residual: jax.Array | None, swiglu: bool, activations: str
) -> None:
    (k, n), types = weight.shape, (jnp.bfloat16, jnp.float32)
    if x.ndim != 2 or x.dtype not in types or x.shape[1] != k or x.shape[0] == 0:
        raise ValueError(f"quantised_linear: x {x.dtype} {x.shape} must be bfloat16 or float32 [rows, {k}]")
    if norm is not None and (norm.shape != (k,) or norm.dtype != jnp.bfloat16):
        raise ValueError(f"quantised_linear: norm {norm.dtype} {norm.shape} must be bfloat16 [{k}]")
    if swiglu and n % 2:
        raise ValueError(f"quantised_linear: swiglu needs gate and up of one width, N is {n}")
    want = (x.shape[0], n // 2 if swiglu else n)
    if residual is not None and (residual.shape != want or residual.dtype != x.dtype):
        raise ValueError(f"quantised_linear: residual {residual.dtype} {residual.shape} must be {x.dtype} {want}")
    if activations not in ("bf16", "int8"):
        raise ValueError(f"quantised_linear: activations {activations!r} is not one of bf16, int8")
    if activations == "int8" and x.shape[0] <= kernel.ROWS:
        raise ValueError(f"quantised_linear: activations int8 is for more than {kernel.ROWS} rows, x has {x.shape[0]}")


def _unfit(x: jax.Array, weight: QuantisedWeight, swiglu: bool) -> dict[str, str]:
    """Why a GPU's kernels cannot take what the other forms do, by form."""
    why = ""
    if x.dtype != jnp.bfloat16:
        why = f"quantised_linear: x {x.dtype} {x.shape} must be bfloat16 [rows, {weight.shape[0]}] on a GPU"
    elif swiglu and weight.shape[1] % (2 * COLUMNS):
        why = f"quantised_linear: swiglu needs N a multiple of {2 * COLUMNS} on a GPU, not {weight.shape[1]}"
    return {"pallas": why, "triton": why}
