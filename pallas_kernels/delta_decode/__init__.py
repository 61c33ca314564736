"""Gated DeltaNet between its projections, for decode and verify rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.delta_decode import cpu, kernel, reference
from pallas_kernels.delta_rule import Layout, ring_rows

__all__ = ["check_delta", "check_rings", "delta_decode", "unfit_heads"]


def delta_decode(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    records: jax.Array,
    start: jax.Array,
    count: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    zero: jax.Array,
    *,
    rows: int,
    eps: float,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows that each slot accepted of the last pass enter its states; then `rows` new rows go through convolution,
    gates, delta rule and gated norm, and leave what it takes to let some of them enter next time.

    projected `[slots * rows, channels + value_heads * value_dim]`: raw convolution inputs `[q | k | v]`, then the gate z;
    ab `[slots * rows, 2 * value_heads]`: a, then b; recurrent float32 `[slots, value_heads, key_dim, value_dim]`; conv
    `[slots, ring, channels]` and records float32 `[slots, ring, columns]` (`delta_rule.Layout`), rings of at least
    `ring_rows(rows, width)` rows; start int32 `[slots]`, in 0..ring - 1: the row of `records` with the first row that
    waits, and of `conv` with the first of the width - 1 raw inputs before it; count int32 `[slots]`: so many rows wait, at
    most ring - rows; negative: the slot takes no part. taps float32 `[channels, 1, width]`; a_log, dt_bias float32
    `[value_heads]`; norm float32 `[value_dim]`; zero from `elementary.opaque_zero`.

    Returns `[slots * rows, value_heads * value_dim]` in projected's dtype, ready for the output projection, then conv,
    recurrent and records, in place: donate them. The new rows' raw inputs and records follow those that waited: the next
    call's start is (start + count) mod ring, and its count how many of them it takes. recurrent is written only where rows
    waited. A slot that takes no part gives zeros and keeps all its bits. A row's bits depend on the rows before it only.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas`, `cpu` (compiled by LLVM) and `xla` insist. ValueError for
    shapes that do not fit.
    """
    check_delta("delta_decode", projected, ab, conv, recurrent, taps, a_log, dt_bias, norm)
    if projected.shape[0] != recurrent.shape[0] * rows:
        raise ValueError(f"delta_decode: projected has {projected.shape[0]} rows, not {recurrent.shape[0]} slots x {rows}")
    check_rings("delta_decode", recurrent, conv, records, start, count, rows=rows, width=taps.shape[2])

    def pallas(*a):
        return kernel.delta_decode(*a[:-1], rows=rows, eps=eps)

    def compiled(*a):
        return cpu.delta_decode(*a[:-1], rows=rows, eps=eps)

    def xla(*a):
        return reference.delta_decode(*a, rows=rows, eps=eps)

    arguments = (projected, ab, conv, recurrent, records, start, count, taps, a_log, dt_bias, norm, zero)
    unfit = {"pallas": unfit_heads("delta_decode", recurrent), "cpu": cpu.unfit("delta_decode", *recurrent.shape[2:])}
    if not unfit["pallas"] and rows > kernel.MAX_ROWS:
        unfit["pallas"] = f"delta_decode: rows {rows}, the kernel takes at most {kernel.MAX_ROWS}"
    return launch.by_platform(*arguments, pallas=pallas, cpu=compiled, xla=xla, impl=impl, unfit=unfit)


def unfit_heads(op: str, recurrent: jax.Array) -> str:
    """Why the kernels cannot take heads of this size, or nothing."""
    key_dim, value_dim = recurrent.shape[2:]
    if all(launch.is_power_of_two(n) and 32 <= n <= 256 for n in (key_dim, value_dim)):
        return ""
    return f"{op}: key_dim {key_dim} and value_dim {value_dim} must be powers of two from 32 to 256 for the kernel"


def check_delta(
    op: str,
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
) -> None:
    """ValueError, naming the argument, where these do not belong to one Gated DeltaNet layer. conv may have rows beyond
    the width - 1 of a window."""
    key_heads = check_heads(op, conv, recurrent)
    _, value_heads, key_dim, value_dim = recurrent.shape
    channels, values = conv.shape[2], value_heads * value_dim
    for name, array, want in (
        ("projected", projected, (projected.shape[0], channels + values)),
        ("ab", ab, (projected.shape[0], 2 * value_heads)),
        ("taps", taps, (2 * key_heads * key_dim + values, 1, taps.shape[-1])),
        ("a_log", a_log, (value_heads,)),
        ("dt_bias", dt_bias, (value_heads,)),
        ("norm", norm, (value_dim,)),
    ):
        if array.shape != want:
            raise ValueError(f"{op}: {name} {array.shape} must be {want}")
    if conv.shape[1] < taps.shape[2] - 1:
        raise ValueError(f"{op}: conv has {conv.shape[1]} rows, {taps.shape[2]} taps need {taps.shape[2] - 1}")


def check_heads(op: str, conv: jax.Array, recurrent: jax.Array) -> int:
    """Key heads of a layer whose states these are; ValueError, naming the argument, where they are of no layer."""
    if recurrent.ndim != 4 or recurrent.dtype != jnp.float32:
        raise ValueError(
            f"{op}: recurrent {recurrent.dtype} {recurrent.shape} must be float32 [slots, value_heads, key_dim, value_dim]"
        )
    slots, value_heads, key_dim, value_dim = recurrent.shape
    values = value_heads * value_dim
    if conv.ndim != 3 or conv.shape[0] != slots:
        raise ValueError(f"{op}: conv {conv.shape} must be [{slots}, rows, channels]")
    channels = conv.shape[2]
    if channels <= values or (channels - values) % (2 * key_dim) or value_heads % ((channels - values) // (2 * key_dim)):
        raise ValueError(
            f"{op}: conv has {channels} channels, must be 2 x key_heads x {key_dim} + {values}, "
            f"key_heads a divisor of {value_heads}"
        )
    return (channels - values) // (2 * key_dim)


def check_rings(
    op: str, recurrent: jax.Array, conv: jax.Array, records: jax.Array, start: jax.Array, count: jax.Array, *, rows: int, width: int
) -> None:
    """ValueError, naming the argument, where these rings are not of one layer or too short for passes of `rows` rows."""
    layout = Layout(check_heads(op, conv, recurrent), recurrent.shape[1], *recurrent.shape[2:])
    slots, ring = conv.shape[:2]
    if ring < ring_rows(rows, width):
        raise ValueError(f"{op}: conv has {ring} rows, {rows} rows a slot need {ring_rows(rows, width)}")
    for name, array, want in (
        ("records", records, (slots, ring, layout.columns)),
        ("start", start, (slots,)),
        ("count", count, (slots,)),
    ):
        if array.shape != want:
            raise ValueError(f"{op}: {name} {array.shape} must be {want}")
