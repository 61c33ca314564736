"""Decode and verify rows on a CPU, one call: see kernel.py, whose cut of the work this is.

Split s of 16 takes the pages s, s + 16, ... of a slot and KV head, for all rows and query heads at once: a page is read
once. The splits are the call's parts, as many of them at work as there are cores; who finishes the last one of a slot and
KV head puts them together. Neither rows, slots nor threads decide a sum's order (`cpu_walk`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.kv_codecs import uses_rotation
from pallas_kernels.kv_pages import KVPages, pages_struct

SPLITS = 16


def decode_attention(
    q: jax.Array, projected: jax.Array, pool: KVPages, table: jax.Array, positions: jax.Array, filled: jax.Array, *, format: str
) -> jax.Array:
    """The package's `decode_attention` on a CPU; its checks are relied on."""
    leaves = jax.tree.leaves(pool)
    pages, kv_heads = leaves[0].shape[:2]
    dtype, (slots, rows, query_heads, dims) = jnp.dtype(projected.dtype).name, q.shape
    shape = Shape(slots, rows, query_heads, dims, kv_heads, pages, table.shape[1], projected.shape[1], format, dtype)
    return _kernel(shape)(q, projected, table, positions, filled, *leaves)[0]


@dataclasses.dataclass(frozen=True)
class Shape:
    """pages: of the pool; per_slot: of a table's row; width: columns of projected, whose dtype is that of the result."""

    slots: int
    rows: int
    query_heads: int
    dims: int
    kv_heads: int
    pages: int
    per_slot: int
    width: int
    format: str
    dtype: str

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def columns(self) -> int:
        """(row, query head) pairs that read the pages of a slot and KV head."""
        return self.rows * self.group

    @property
    def rotated(self) -> bool:
        return uses_rotation(self.format)


@functools.cache
def _kernel(shape: Shape) -> cpu.Kernel:
    struct = jax.ShapeDtypeStruct
    lines = shape.slots * shape.rows
    leaves = jax.tree.leaves(pages_struct(shape.format, shape.pages, shape.kv_heads, shape.dims))
    lead = (shape.slots, shape.kv_heads, SPLITS, shape.columns)

    def build(c, *views) -> None:
        from pallas_kernels.decode_attention.cpu_walk import Walk  # needs LLVM

        Walk(c, shape, views[:5], views[5 : 5 + len(leaves)], views[5 + len(leaves) :]).run()

    def before(c, *views) -> None:
        left = views[-1]
        c.loop(0, shape.slots, [], lambda s: c.loop(0, shape.kv_heads, [], lambda h: left.store(SPLITS, s, h)))

    return cpu.kernel(
        f"decode_attention_{shape.format}",
        build,
        [
            struct((shape.slots, shape.rows, shape.query_heads, shape.dims), "float32"),
            struct((lines, shape.width), shape.dtype),
            struct((shape.slots, shape.per_slot), "int32"),
            struct((shape.slots, shape.rows), "int32"),
            struct((shape.slots,), "int32"),
            *leaves,
        ],
        [struct((lines, shape.query_heads * shape.dims), shape.dtype)],
        parts=shape.slots * shape.kv_heads * SPLITS,
        before=before,
        workspace=[
            struct((*lead, shape.dims), "float32"),  # weighted values
            struct(lead, "float32"),  # largest scores
            struct(lead, "float32"),  # sums of weights
            struct((shape.slots, shape.kv_heads), "int32"),  # splits that are not done
        ],
    )
