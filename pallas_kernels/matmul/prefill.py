"""Prefill: many rows times a quantised weight, bound by tensor cores rather than by memory.

Two routes over the same packed weight:
`bf16`: codes x scale rounded to bf16 in registers, bf16 products. The rounding is 2^-9 of each weight.
`int8`: activations to 8 bits first, symmetric, one scale per row and group of K; 8-bit products at up to four times
the bf16 rate, exact integer sums per group, scaled to float32 between groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.matmul import unpack
from pallas_kernels.matmul.quantised import COLUMNS, QuantisedWeight

# As int32 these bits plus an integer below 2^22 are the float 1.5 x 2^23 + that integer: no conversion needed.
_MAGIC_BITS, _MAGIC = 0x4B400000, 12582912.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows and columns a block computes (a SwiGLU block computes that many of gate and of up each), warps, stages."""

    rows: int = 128
    columns: int = 128
    warps: int = 8
    stages: int = 2


def default_config(swiglu: bool) -> Config:
    """The largest tile without spills on sm_89 in both supported versions of JAX; SwiGLU holds two products."""
    return Config(columns=32 if swiglu else 64)


@functools.partial(jax.jit, static_argnames="group")
def quantise_activations(x: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """x `[rows, K]` -> int8 `[rows, padded K]` in the kernel's order and float32 scales `[padded K / group, rows]`."""
    rows, k = x.shape
    tile = 4 * group
    padded = -(-k // tile) * tile
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padded - k))).reshape(rows, -1, group)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    codes = jnp.round(x * jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))[..., None])
    codes = codes.astype(jnp.int8).reshape(rows, padded)
    return unpack.permute_k(codes), scale.T


@functools.partial(jax.jit, static_argnames=("route", "swiglu", "out_dtype", "config", "interpret"))
def prefill(
    x: jax.Array,
    weight: QuantisedWeight,
    residual: jax.Array | None = None,
    *,
    route: str = "bf16",
    swiglu: bool = False,
    out_dtype: Any = jnp.bfloat16,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`matmul.quantised_linear` without the norm, x `[rows, K]` bf16 of any number of rows."""
    rows = x.shape[0]
    n = weight.shape[1] // 2 if swiglu else weight.shape[1]
    config = config or default_config(swiglu)
    if COLUMNS % config.columns:
        raise ValueError(f"prefill: {config.columns} columns a block must divide {COLUMNS}, the padding of weights")
    activations = quantise_activations(x, weight.group) if route == "int8" else (x,)
    operands = [*activations, weight.words, weight.scales, weight.unit] + ([] if residual is None else [residual])
    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    kernel = functools.partial(
        _prefill_kernel,
        config=config,
        sizes=(rows, weight.shape[0], n),
        bits=weight.bits,
        group=weight.group,
        route=route,
        swiglu=swiglu,
        added=residual is not None,
        interpret=interpret,
    )
    return launch.launch(
        kernel,
        name=f"w{weight.bits}_prefill_{route}" + "_swiglu" * swiglu + "_add" * (residual is not None),
        # Rows run fastest, so that blocks in flight share their part of the weight in L2.
        grid=(-(-rows // config.rows), -(-n // config.columns)),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=launch.whole(out),
        out_shape=out,
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
    )(*operands)


def _prefill_kernel(
    *refs: Any,
    config: Config,
    sizes: tuple[int, int, int],
    bits: int,
    group: int,
    route: str,
    swiglu: bool,
    added: bool,
    interpret: bool,
) -> None:
    """One block of rows and columns: all of K in its registers' sums."""
    x_ref, *rest = refs
    xs_ref = rest.pop(0) if route == "int8" else None
    w_ref, s_ref, u_ref, *rest = rest
    residual_ref = rest.pop(0) if added else None
    (o_ref,) = rest
    rows, k, n = sizes
    planes = 16 // bits
    block = (config.rows, config.columns)
    row, column = pl.program_id(0) * config.rows, pl.program_id(1) * config.columns
    starts = (column, column + n) if swiglu else (column,)

    def masked(ref: Any, at: Any, width: int, limit: int | None) -> jax.Array:
        """Rows of this block of `ref`, `width` columns from `at` on, zeros outside; columns end at `limit` if given."""
        mask = None
        if rows % config.rows:
            mask = row + jax.lax.broadcasted_iota(jnp.int32, (config.rows, width), 0) < rows
        if limit is not None:
            inside = at + jax.lax.broadcasted_iota(jnp.int32, (config.rows, width), 1) < limit
            mask = inside if mask is None else mask & inside
        return launch.load(ref, (pl.ds(row, config.rows), pl.ds(at, width)), mask)

    def step(t: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # A tile of the weight: words with a code of each of its groups, and their scales.
        blocks = pl.ds(t * (group // 32), group // 32)
        words = [launch.load(w_ref, (blocks, pl.ds(at * 32, config.columns * 32))) for at in starts]
        scales = [launch.load(s_ref, (t, pl.ds(at, config.columns))) for at in starts]
        for j in range(planes):
            g = planes * t + j
            x = masked(x_ref, g * group, group, k if ragged else None)
            new = []
            for word, packed, total in zip(words, scales, sums, strict=True):
                scale = unpack.scale(packed, j, interpret)
                if route == "bf16":
                    # Codes x scale, rounded to bf16, so that all groups share one sum.
                    w = unpack.plane(word, bits, j, config.columns, interpret)
                    w = unpack.times(w, jnp.broadcast_to(scale.astype(jnp.bfloat16)[None], w.shape), interpret)
                    new.append(total + launch.dot(x, w))
                else:
                    # An exact integer product: it becomes a float by starting at the bits of a large one, see _MAGIC.
                    w = unpack.plane_s8(word, bits, j, config.columns, interpret)
                    exact = jnp.full(block, _MAGIC_BITS, jnp.int32) + launch.dot(x, w)
                    exact = jax.lax.bitcast_convert_type(exact, jnp.float32) - _MAGIC
                    # The two scales of this group, of the rows' activations and the columns' codes.
                    inside = row + jnp.arange(config.rows) < rows
                    xs = launch.load(xs_ref, (g, pl.ds(row, config.rows)), inside)
                    new.append(total + exact * (xs[:, None] * scale[None]))
            sums = tuple(new)
        return sums

    # The int8 activations were padded to whole tiles.
    ragged = route == "bf16" and k % (planes * group) != 0
    zeros = tuple(jnp.zeros(block, jnp.float32) for _ in starts)
    sums = jax.lax.fori_loop(0, -(-k // (planes * group)), step, zeros)
    # 8-bit products of w4 are of 16 x its codes.
    sixteenth = 1 / 16 if route == "int8" and bits == 4 else 1
    sums = tuple(s * (launch.load(u_ref, pl.ds(at, config.columns)) * sixteenth)[None] for s, at in zip(sums, starts, strict=True))
    # What rides along, and only what lies inside the result is written.
    y = jax.nn.silu(sums[0]) * sums[1] if swiglu else sums[0]
    if added:
        y = y + masked(residual_ref, column, config.columns, n if n % config.columns else None).astype(jnp.float32)
    mask = row + jax.lax.broadcasted_iota(jnp.int32, block, 0) < rows
    mask &= column + jax.lax.broadcasted_iota(jnp.int32, block, 1) < n
    launch.store(o_ref, (pl.ds(row, config.rows), pl.ds(column, config.columns)), y, mask)
