"""Attention of decode and verify rows over paged, possibly quantised keys and values."""

from __future__ import annotations

import jax

from pallas_kernels import launch
from pallas_kernels.decode_attention import cpu, kernel, reference
from pallas_kernels.kv_codecs import check_format
from pallas_kernels.kv_pages import KVPages

__all__ = ["decode_attention"]


def decode_attention(
    q: jax.Array,
    projected: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    filled: jax.Array,
    *,
    format: str,
    impl: str = "auto",
) -> jax.Array:
    """Gated attention of `rows` rows of every slot, `[slots * rows, query_heads * head_dim]` in projected's dtype.

    q float32 `[slots, rows, query_heads, head_dim]` and projected `[slots * rows, ...]`: what `attention_inputs` gave and
    took; only the gate columns of projected are read. table int32 `[slots, pages_per_slot]`; positions int32
    `[slots, rows]`: row r sees tokens 0..positions[r]; filled int32 `[slots]`: tokens in the pages, the new rows included
    (0 for an empty slot: zeros come back). The result is softmax(q K^T) V in the model's basis, times sigmoid(gate). The
    cost follows `filled`, not the table's width; a row's bits do not depend on the rows beside it.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas`, `cpu` (compiled by LLVM) and `xla` insist. ValueError for
    shapes that do not fit.
    """
    _check(q, projected, pool, table, positions, filled, format)
    arguments = (q, projected, pool, table, positions, filled)

    def by(attend):
        return lambda *a: attend(*a, format=format)

    forms = {name: by(module.decode_attention) for name, module in (("pallas", kernel), ("cpu", cpu), ("xla", reference))}
    unfit = kernel.unfit(q.shape, jax.tree.leaves(pool.k)[0].shape[1], format)
    return launch.by_platform(*arguments, **forms, impl=impl, unfit=unfit)


def _check(
    q: jax.Array, projected: jax.Array, pool: KVPages, table: jax.Array, positions: jax.Array, filled: jax.Array, format: str
) -> None:
    if q.ndim != 4:
        raise ValueError(f"decode_attention: q {q.shape} must be [slots, rows, query_heads, head_dim]")
    slots, rows, query_heads, head_dim = q.shape
    check_format(format, head_dim)
    kv_heads = jax.tree.leaves(pool.k)[0].shape[1]
    if query_heads % kv_heads:
        raise ValueError(f"decode_attention: q has {query_heads} query heads, no multiple of the pool's {kv_heads} KV heads")
    if projected.ndim != 2 or projected.shape[0] != slots * rows or projected.shape[1] < 2 * query_heads * head_dim:
        raise ValueError(
            f"decode_attention: projected {projected.shape} must be [{slots * rows}, at least {2 * query_heads * head_dim}]"
        )
    for name, array, want in (("positions", positions, (slots, rows)), ("filled", filled, (slots,))):
        if array.shape != want:
            raise ValueError(f"decode_attention: {name} {array.shape} must be {want}")
    if table.ndim != 2 or table.shape[0] != slots:
        raise ValueError(f"decode_attention: table {table.shape} must be [{slots}, pages_per_slot]")
