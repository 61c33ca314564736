"""Attention of a prefill chunk over a slot's paged, possibly quantised keys and values."""

from __future__ import annotations

import jax

from pallas_kernels import launch
from pallas_kernels.kv_codecs import check_format
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.prefill_attention import kernel, reference

__all__ = ["prefill_attention"]


def prefill_attention(
    q: jax.Array,
    projected: jax.Array,
    pool: KVPages,
    table: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    format: str,
    impl: str = "auto",
) -> jax.Array:
    """Gated attention of a chunk at positions start, start + 1, ... -> `[tokens, query_heads * head_dim]` in projected's
    dtype.

    q float32 `[tokens, query_heads, head_dim]` and projected `[tokens, ...]`: what `attention_inputs` gave and took; only
    the gate columns of projected are read. table int32 `[pages_per_slot]`; start, count int32 scalars: only the first
    `count` rows are valid (the others' results are finite), and the pages hold start + count tokens, the chunk's included.
    Pages beyond them are not touched.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas` and `xla` insist. ValueError for shapes that do not fit.
    """
    if q.ndim != 3:
        raise ValueError(f"prefill_attention: q {q.shape} must be [tokens, query_heads, head_dim]")
    tokens, query_heads, head_dim = q.shape
    check_format(format, head_dim)
    kv_heads = jax.tree.leaves(pool.k)[0].shape[1]
    if query_heads % kv_heads:
        raise ValueError(f"prefill_attention: q has {query_heads} query heads, no multiple of the pool's {kv_heads} KV heads")
    if projected.ndim != 2 or projected.shape[0] != tokens or projected.shape[1] < 2 * query_heads * head_dim:
        raise ValueError(
            f"prefill_attention: projected {projected.shape} must be [{tokens}, at least {2 * query_heads * head_dim}]"
        )
    if table.ndim != 1:
        raise ValueError(f"prefill_attention: table {table.shape} must be [pages_per_slot]")

    def by(attend):
        return lambda *a: attend(*a, format=format)

    pallas, xla = by(kernel.prefill_attention), by(reference.prefill_attention)
    return launch.by_platform(q, projected, pool, table, start, count, pallas=pallas, xla=xla, impl=impl)
