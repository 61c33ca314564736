"""Gated DeltaNet between its projections, for decode and verify rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.delta_decode import kernel, reference
from pallas_kernels.delta_rule import Transitions

__all__ = ["check_delta", "delta_decode", "unfit_heads"]


def delta_decode(
    projected: jax.Array, ab: jax.Array, conv: jax.Array, recurrent: jax.Array, taps: jax.Array, a_log: jax.Array,
    dt_bias: jax.Array, norm: jax.Array, zero: jax.Array, *, rows: int, eps: float, impl: str = "auto",
) -> tuple[jax.Array, Transitions]:  # fmt: skip
    """`rows` rows of every slot through convolution, gates, delta rule and gated norm, after the states as they are.

    projected `[slots * rows, channels + value_heads * value_dim]`: raw convolution inputs `[q | k | v]`, then the gate z;
    ab `[slots * rows, 2 * value_heads]`: a, then b; conv `[slots, width - 1, channels]`: the raw inputs before, oldest
    first; recurrent float32 `[slots, value_heads, key_dim, value_dim]`, only read; taps float32 `[channels, 1, width]`;
    a_log, dt_bias float32 `[value_heads]`; norm float32 `[value_dim]`; zero from `elementary.opaque_zero`. Returns
    `[slots * rows, value_heads * value_dim]` in projected's dtype, ready for the output projection, and the records from
    which `delta_fold` replays the accepted rows. A row's bits depend on the rows before it only.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas` and `xla` insist. ValueError for shapes that do not fit.
    """
    check_delta("delta_decode", projected, ab, conv, recurrent, taps, a_log, dt_bias, norm)
    if projected.shape[0] != recurrent.shape[0] * rows:
        raise ValueError(f"delta_decode: projected has {projected.shape[0]} rows, not {recurrent.shape[0]} slots x {rows}")

    def pallas(*a):
        return kernel.delta_decode(*a[:-1], rows=rows, eps=eps)

    def xla(*a):
        return reference.delta_decode(*a, rows=rows, eps=eps)

    arguments = (projected, ab, conv, recurrent, taps, a_log, dt_bias, norm, zero)
    unfit = unfit_heads("delta_decode", recurrent) or ("" if rows <= kernel.MAX_ROWS else f"delta_decode: rows {rows}, the kernel takes at most {kernel.MAX_ROWS}")
    return launch.by_platform(*arguments, pallas=pallas, xla=xla, impl=impl, unfit=unfit)


def unfit_heads(op: str, recurrent: jax.Array) -> str:
    """Why the kernels cannot take heads of this size, or nothing."""
    key_dim, value_dim = recurrent.shape[2:]
    if all(launch.is_power_of_two(n) and 32 <= n <= 256 for n in (key_dim, value_dim)):
        return ""
    return f"{op}: key_dim {key_dim} and value_dim {value_dim} must be powers of two from 32 to 256 for the kernel"


def check_delta(
    op: str, projected: jax.Array, ab: jax.Array, conv: jax.Array, recurrent: jax.Array, taps: jax.Array, a_log: jax.Array,
    dt_bias: jax.Array, norm: jax.Array,
) -> None:  # fmt: skip
    """ValueError, naming the argument, where these do not belong to one Gated DeltaNet layer."""
    if recurrent.ndim != 4 or recurrent.dtype != jnp.float32:
        raise ValueError(f"{op}: recurrent {recurrent.dtype} {recurrent.shape} must be float32 [slots, value_heads, key_dim, value_dim]")
    slots, value_heads, key_dim, value_dim = recurrent.shape
    values = value_heads * value_dim
    if conv.ndim != 3 or conv.shape[0] != slots:
        raise ValueError(f"{op}: conv {conv.shape} must be [{slots}, width - 1, channels]")
    channels = conv.shape[2]
    if channels <= values or (channels - values) % (2 * key_dim) or value_heads % ((channels - values) // (2 * key_dim)):
        raise ValueError(f"{op}: conv has {channels} channels, must be 2 x key_heads x {key_dim} + {values}, key_heads a divisor of {value_heads}")
    for name, array, want in (
        ("projected", projected, (projected.shape[0], channels + values)), ("ab", ab, (projected.shape[0], 2 * value_heads)),
        ("taps", taps, (channels, 1, conv.shape[1] + 1)), ("a_log", a_log, (value_heads,)),
        ("dt_bias", dt_bias, (value_heads,)), ("norm", norm, (value_dim,)),
    ):  # fmt: skip
        if array.shape != want:
            raise ValueError(f"{op}: {name} {array.shape} must be {want}")
