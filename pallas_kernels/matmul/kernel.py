"""Decode: up to 16 rows times a quantised weight, one tensor-core tile high, at the speed of reading the weight.

Each block owns some columns and walks all of K, so no partial sums go through memory and a row's sums have one order
whatever the number of rows (missing rows are zeros). What surrounds a projection rides along: RMSNorm before it,
SwiGLU or the residual after it.

Norm: y = r (x (1 + w)) @ W with r = 1 / sqrt(mean(x^2) + eps) a row's own factor, applied to the finished sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch, tuned
from pallas_kernels.matmul import unpack
from pallas_kernels.matmul.quantised import COLUMNS, QuantisedWeight

ROWS = 16
NORM_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """columns a block computes, warps a block, depth of the loads running ahead."""

    columns: int = 64
    warps: int = 4
    stages: int = 3


def shape_key(k: int, n: int, bits: int, group: int, norm: bool, swiglu: bool) -> str:
    """The key of a projection's block sizes in `tuned`: everything that weighs on them, and not the number of rows."""
    return f"k{k}_n{n}_w{bits}g{group}" + "_norm" * norm + "_swiglu" * swiglu


def tuned_config(weight: QuantisedWeight, norm: bool, swiglu: bool) -> Config:
    """Block sizes tuned for the card being compiled for, or else the default ones."""
    key = shape_key(*weight.shape, weight.bits, weight.group, norm, swiglu)
    if fields := tuned.lookup("quantised_matmul", key):
        return Config(**fields)
    return default_config(weight.shape[1] // 2 if swiglu else weight.shape[1], weight.group, swiglu)


def default_config(columns: int, group: int, swiglu: bool) -> Config:
    """The widest blocks that still give every SM of a 4090 one: each block reads all of x from L2.

    A SwiGLU block computes its columns twice, of gate and of up. Groups of 128 make tiles of twice the size.
    """
    total = columns * (2 if swiglu else 1)
    wide = 32 if total < 12288 else 64 if total < 128 * 128 or group == 128 else 128
    stages = (2 if group == 128 else 3) + (wide == 32)
    return Config(wide // 2 if swiglu else wide, max(4, wide // 16), stages)


@functools.partial(jax.jit, static_argnames=("eps", "swiglu", "out_dtype", "config", "interpret"))
def decode(
    x: jax.Array,
    weight: QuantisedWeight,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    swiglu: bool = False,
    out_dtype: Any = jnp.bfloat16,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`matmul.quantised_linear` of x `[1..16, K]` bf16 in one launch; its checks are relied on."""
    rows, _ = x.shape
    n = weight.shape[1] // 2 if swiglu else weight.shape[1]
    config = config or tuned_config(weight, norm is not None, swiglu)
    if COLUMNS % config.columns:
        raise ValueError(f"decode: {config.columns} columns a block must divide {COLUMNS}, the padding of weights")
    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    operands = [a for a in (x, weight.words, weight.scales, weight.unit, norm, residual) if a is not None]
    kernel = functools.partial(
        _decode_kernel,
        shape=DecodeShape(rows, weight.shape[0], n, weight.bits, weight.group, config.columns, interpret),
        normed=norm is not None,
        added=residual is not None,
        eps=eps,
        swiglu=swiglu,
    )
    return launch.launch(
        kernel,
        name=f"w{weight.bits}_decode" + "_norm" * (norm is not None) + "_swiglu" * swiglu + "_add" * (residual is not None),
        grid=(-(-n // config.columns),),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=launch.whole(out),
        out_shape=out,
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
    )(*operands)


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """The static facts a decode kernel body needs: sizes, format, columns a block."""

    rows: int
    k: int
    n: int
    bits: int
    group: int
    columns: int
    interpret: bool

    @property
    def planes(self) -> int:
        """Codes in a 16-bit word, each of another group of a tile."""
        return 16 // self.bits

    @property
    def tile(self) -> int:
        """Rows of K in a tile, see `quantised`."""
        return self.group * self.planes

    def mask(self, at: Any, size: int, limit: int) -> jax.Array | None:
        """bool `[16, size]`: rows that exist, and columns below `limit` where the block may overhang; None where all do."""
        mask = None
        if self.rows < ROWS:
            mask = jax.lax.broadcasted_iota(jnp.int32, (ROWS, size), 0) < self.rows
        if limit % size or limit % self.tile:
            inside = at + jax.lax.broadcasted_iota(jnp.int32, (ROWS, size), 1) < limit
            mask = inside if mask is None else mask & inside
        return mask

    def block(self, ref: Any, at: Any, size: int, limit: int) -> jax.Array:
        """`ref[:16, at : at + size]`, zeros outside the array."""
        return launch.load(ref, (pl.ds(0, ROWS), pl.ds(at, size)), self.mask(at, size, limit))


def _decode_kernel(*refs: Any, shape: DecodeShape, normed: bool, added: bool, eps: float, swiglu: bool) -> None:
    """The columns of one block, for all rows, with what surrounds the projection."""
    x_ref, *rest = refs
    weight_refs, rest = rest[:3], rest[3:]
    norm_ref = rest.pop(0) if normed else None
    residual_ref = rest.pop(0) if added else None
    (o_ref,) = rest
    # A SwiGLU block computes a column of gate and the same one of up, which lies N columns further.
    at = pl.program_id(0) * shape.columns
    starts = (at, at + shape.n) if swiglu else (at,)
    sums = accumulate(x_ref, weight_refs, norm_ref, starts, shape)
    if normed:
        # A row's factor commutes with the product: it multiplies the finished sums.
        factor = inverse_rms(x_ref, eps, shape)[:, None]
        sums = tuple(s * factor for s in sums)
    y = jax.nn.silu(sums[0]) * sums[1] if swiglu else sums[0]
    if added:
        y = y + shape.block(residual_ref, at, shape.columns, shape.n).astype(jnp.float32)
    launch.store(o_ref, (pl.ds(0, ROWS), pl.ds(at, shape.columns)), y, shape.mask(at, shape.columns, shape.n))


def accumulate(
    x_ref: Any, weight_refs: Sequence[Any], norm_ref: Any, starts: tuple[Any, ...], shape: DecodeShape
) -> tuple[jax.Array, ...]:
    """Float32 sums `[16, columns]` over all of K, for the columns from each of `starts` on.

    weight_refs: words, scales and unit.
    """
    w_ref, s_ref, u_ref = weight_refs
    group, columns, tiles = shape.group, shape.columns, -(-shape.k // shape.tile)

    def load_scales(t: Any) -> tuple[jax.Array, ...]:
        return tuple(launch.load(s_ref, (t, pl.ds(at, columns))) for at in starts)

    def step(t: Any, carry: tuple[tuple[jax.Array, ...], ...]) -> tuple[tuple[jax.Array, ...], ...]:
        sums, scales = carry
        # A tile ahead, as the compiler does it for words and x: nothing in the loop waits for memory.
        following = load_scales(jnp.minimum(t + 1, tiles - 1))
        # One word holds a code of each of the tile's groups: the words of a tile are loaded once for all of them.
        blocks = pl.ds(t * (group // 32), group // 32)
        words = [launch.load(w_ref, (blocks, pl.ds(at * 32, columns * 32))) for at in starts]
        for j in range(shape.planes):
            # Group g of K: its stretch of x, times 1 + w if there is a norm.
            g = shape.planes * t + j
            x = shape.block(x_ref, g * group, group, shape.k)
            if norm_ref is not None:
                inside = None
                if shape.k % shape.tile:
                    inside = g * group + jnp.arange(group) < shape.k
                w = launch.load(norm_ref, pl.ds(g * group, group), inside)
                x = unpack.times_one_plus(x, jnp.broadcast_to(w[None], x.shape), shape.interpret)
            # Its codes become bf16; the product of codes is exact but for its float32 sums, and the scale multiplies those.
            new = []
            for word, scale, total in zip(words, scales, sums, strict=True):
                codes = unpack.plane(word, shape.bits, j, columns, shape.interpret)
                new.append(total + launch.dot(x, codes) * unpack.scale(scale, j, shape.interpret)[None])
            sums = tuple(new)
        return sums, following

    # Tile by tile through all of K, then each column's unit.
    zeros = tuple(jnp.zeros((ROWS, columns), jnp.float32) for _ in starts)
    sums, _ = jax.lax.fori_loop(0, tiles, step, (zeros, load_scales(0)))
    return tuple(s * launch.load(u_ref, pl.ds(at, columns))[None] for s, at in zip(sums, starts, strict=True))


def inverse_rms(x_ref: Any, eps: float, shape: DecodeShape) -> jax.Array:
    """1 / sqrt(mean(x^2) + eps) of each row, `[16]`."""

    def step(i: Any, total: jax.Array) -> jax.Array:
        at = i * NORM_CHUNK
        mask = jax.lax.broadcasted_iota(jnp.int32, (ROWS, NORM_CHUNK), 0) < shape.rows
        if shape.k % NORM_CHUNK:
            mask &= at + jax.lax.broadcasted_iota(jnp.int32, (ROWS, NORM_CHUNK), 1) < shape.k
        x = launch.load(x_ref, (pl.ds(0, ROWS), pl.ds(at, NORM_CHUNK)), mask).astype(jnp.float32)
        return total + x * x

    chunks = -(-shape.k // NORM_CHUNK)
    squares = jax.lax.fori_loop(0, chunks, step, jnp.zeros((ROWS, NORM_CHUNK), jnp.float32))
    return jax.lax.rsqrt(jnp.sum(squares, axis=1) / shape.k + eps)
