"""Two projections of one normed input in one launch of up to 16 rows: a wide one, and a narrow one that rides along.

A launch of the narrow one alone would be a few blocks that walk all of K one load after another, with the rest of the card
idle. Here its blocks come first in the grid and run beside those of the wide one, on SMs that hold two. A block does one
or the other, by the very steps of `kernel.decode`: the bits are those of two launches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.matmul import kernel
from pallas_kernels.matmul.quantised import COLUMNS, QuantisedWeight

NARROW = 32  # columns a block of the narrow one computes


@functools.partial(jax.jit, static_argnames=("eps", "out_dtype", "config", "interpret"))
def decode(
    x: jax.Array,
    wide: QuantisedWeight,
    narrow: QuantisedWeight,
    norm: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    out_dtype: Any = jnp.bfloat16,
    config: kernel.Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`matmul.quantised_linear_pair` of x `[1..16, K]` bf16 in one launch; its checks are relied on. config: of the wide one's
    blocks."""
    config = config or kernel.default_config(wide.shape[1], wide.group, False)
    if COLUMNS % config.columns:
        raise ValueError(f"decode: {config.columns} columns a block must divide {COLUMNS}, the padding of weights")
    shapes = [
        kernel.DecodeShape(x.shape[0], *w.shape, w.bits, w.group, columns, interpret)
        for w, columns in ((narrow, NARROW), (wide, config.columns))
    ]
    operands = [a for w in (narrow, wide) for a in (w.words, w.scales, w.unit)]
    operands = [x, *operands] + ([] if norm is None else [norm])
    out = [jax.ShapeDtypeStruct((x.shape[0], shape.n), out_dtype) for shape in shapes]
    second, first = launch.launch(
        functools.partial(_pair_kernel, shapes=shapes, normed=norm is not None, eps=eps),
        name=f"w{wide.bits}_w{narrow.bits}_pair" + "_norm" * (norm is not None),
        grid=(sum(-(-shape.n // shape.columns) for shape in shapes),),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=[launch.whole(o) for o in out],
        out_shape=out,
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
    )(*operands)
    return first, second


def _pair_kernel(*refs: Any, shapes: Sequence[kernel.DecodeShape], normed: bool, eps: float) -> None:
    """One block of one of the two projections, which is decided by its number."""
    x_ref, *rest = refs
    norm_ref = rest[6] if normed else None
    block = pl.program_id(0)
    # The first `before` blocks are the narrow one's. Both branches are compiled, each block takes one.
    before = -(-shapes[0].n // shapes[0].columns)
    parts = ((block < before, block, rest[:3], rest[-2]), (block >= before, block - before, rest[3:6], rest[-1]))
    for shape, (mine, index, weight_refs, o_ref) in zip(shapes, parts, strict=True):
        pl.when(mine)(functools.partial(_part, x_ref, weight_refs, norm_ref, o_ref, index * shape.columns, shape, eps))


def _part(
    x_ref: Any, weight_refs: Sequence[Any], norm_ref: Any, o_ref: Any, at: Any, shape: kernel.DecodeShape, eps: float
) -> None:
    """Columns from `at` on of one projection, with the very steps of `kernel.decode`."""
    (y,) = kernel.accumulate(x_ref, weight_refs, norm_ref, (at,), shape)
    if norm_ref is not None:
        y = y * kernel.inverse_rms(x_ref, eps, shape)[:, None]
    launch.store(o_ref, (pl.ds(0, kernel.ROWS), pl.ds(at, shape.columns)), y, shape.mask(at, shape.columns, shape.n))
