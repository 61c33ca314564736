"""The second launch: the splits' partial results become one, are rotated back, rounded and gated.

Splits are summed by one fixed tree over all of them. Those without pages count as zeros, so neither the filled length
nor a split that a row does not see changes any bit of the row.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kv_codecs.formats import ROTATION_GROUP as GROUP
from pallas_kernels.kv_pages import NEVER


def merge(
    sums: jax.Array,
    tops: jax.Array,
    totals: jax.Array,
    projected: jax.Array,
    filled: jax.Array,
    *,
    rows: int,
    page: int,
    rotated: bool,
    interpret: bool,
) -> jax.Array:
    """`[slots * rows, query_heads * head_dim]` in projected's dtype.

    sums float32 `[slots, kv_heads, splits, rows * group, head_dim]`; tops (base 2) and totals float32, without the last
    axis: the largest score, and the sum of 2^(score - top) times a constant that sums are times, too. Splits from
    ceil(filled / page) on were never written.
    """
    slots, kv_heads, _, columns, head_dim = sums.shape
    heads = kv_heads * (columns // rows)
    out = jax.ShapeDtypeStruct((slots * rows, heads * head_dim), projected.dtype)
    operands = (sums, tops, totals, projected, filled)
    return launch.launch(
        functools.partial(_merge_kernel, rows=rows, page=page, rotated=rotated),
        name="decode_attention_merge",
        grid=(heads * head_dim // GROUP, rows, slots),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=launch.whole(out),
        out_shape=out,
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*operands)


def _merge_kernel(
    sums_ref: Any,
    tops_ref: Any,
    totals_ref: Any,
    projected_ref: Any,
    filled_ref: Any,
    o_ref: Any,
    *,
    rows: int,
    page: int,
    rotated: bool,
) -> None:
    """One row's 64 dims of one head."""
    _, _, splits, columns, head_dim = sums_ref.shape
    group = columns // rows
    part, row, slot = (pl.program_id(i) for i in range(3))
    head, at = part // (head_dim // GROUP), part % (head_dim // GROUP) * GROUP
    kv_head, column = head // group, row * group + head % group

    # The splits that walked a page; the others' memory was never written and is not read.
    split = jnp.arange(pl.next_power_of_2(splits))
    pages = (launch.load(filled_ref, (slot,)) + page - 1) // page
    written = split < jnp.minimum(pages, splits)
    # Each split's sums are relative to its own largest score: bring them to the largest of all.
    top = launch.load(tops_ref, (slot, kv_head, split, column), written, NEVER)
    weight = jnp.exp2(top - jnp.max(top))
    total = jnp.sum(weight * launch.load(totals_ref, (slot, kv_head, split, column), written, 0.0))
    # Their sum over the total, one fixed tree over splits. An empty slot has total 0 and gets zeros.
    dims = at + jnp.arange(GROUP)
    parts = launch.load(
        sums_ref,
        (slot, kv_head, split[:, None], column, dims[None, :]),
        jnp.broadcast_to(written[:, None], (split.shape[0], GROUP)),
        0.0,
    )
    out = jnp.sum(parts * weight[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    if rotated:
        out = _hadamard(out)
    # Times the sigmoid of the gate, whose columns follow the query's; each factor is rounded to the result's type first.
    dtype = projected_ref.dtype
    line = slot * rows + row
    gate = launch.load(projected_ref, (line, (2 * head + 1) * head_dim + dims)).astype(jnp.float32)
    gated = out.astype(dtype).astype(jnp.float32) * jax.nn.sigmoid(gate).astype(dtype).astype(jnp.float32)
    launch.store(o_ref, (line, head * head_dim + dims), gated)


def _hadamard(x: jax.Array) -> jax.Array:
    """H64 @ x for float32 `x [64]`: entry (i, j) is (-1)^(bits that i and j share) / 8, Sylvester's order."""
    # Signs follow from the two indices. Folding by 4, 2 and 1 leaves the parity of six bits in the lowest one.
    shared = jax.lax.broadcasted_iota(jnp.int32, (GROUP, GROUP), 0) & jax.lax.broadcasted_iota(jnp.int32, (GROUP, GROUP), 1)
    for step in (4, 2, 1):
        shared ^= shared >> step
    return jnp.sum(jnp.where((shared & 1) == 1, -x[:, None], x[:, None]), axis=0) * 0.125
