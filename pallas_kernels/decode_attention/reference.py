"""Attention of decode and verify rows: each slot walks its own filled pages, all rows of a slot share each page read.

Online softmax over blocks of 256 tokens (Dao et al. 2022, Milakov & Gimelshein 2018). A row's arithmetic never
involves another row, and a block that lies wholly beyond a row changes none of its bits (factor exp(0), plus zeros), so
a row's result is the same alone and beside three drafts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append.reference import gates
from pallas_kernels.kv_codecs import rotate, uses_rotation
from pallas_kernels.kv_pages import NEVER, PAGE, KVPages, load_block

BLOCK_PAGES = 4


def decode_attention(
    q: jax.Array, projected: jax.Array, pool: KVPages, table: jax.Array, positions: jax.Array, filled: jax.Array, *, format: str
) -> jax.Array:
    """`decode_attention.decode_attention` in plain jnp."""
    slots, rows, query_heads, head_dim = q.shape
    out = attend(q, pool, table, positions, filled, format).reshape(slots * rows, query_heads, head_dim)
    gated = out.astype(projected.dtype) * jax.nn.sigmoid(gates(projected, query_heads, head_dim))
    return gated.reshape(slots * rows, -1)


def attend(q: jax.Array, pool: KVPages, table: jax.Array, positions: jax.Array, filled: jax.Array, format: str) -> jax.Array:
    """Attention without the gate, float32 `[slots, rows, query_heads, head_dim]`; q as `attention_inputs` gives it."""
    slots, rows, query_heads, head_dim = q.shape
    kv_heads = jax.tree.leaves(pool.k)[0].shape[1]
    q = q.reshape(slots, rows, kv_heads, -1, head_dim)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % BLOCK_PAGES)))
    out = [_one_slot(q[s], pool, table[s], positions[s], filled[s], format) for s in range(slots)]
    out = jnp.stack(out).reshape(slots, rows, query_heads, head_dim)
    return rotate(out) if uses_rotation(format) else out


def _one_slot(q: jax.Array, pool: KVPages, table: jax.Array, positions: jax.Array, filled: jax.Array, format: str) -> jax.Array:
    rows, kv_heads, group, head_dim = q.shape
    block = BLOCK_PAGES * PAGE
    last = jnp.minimum(positions, filled - 1)

    def step(i: jax.Array, carry: tuple) -> tuple:
        k, v = load_block(pool, jax.lax.dynamic_slice_in_dim(table, i * BLOCK_PAGES, BLOCK_PAGES), format)
        token = i * block + jnp.arange(block)
        v = jnp.where((token < filled)[:, None], v, 0.0)  # stale pages may hold anything
        return tuple(_row(q[r], k, v, token <= last[r], *carry[r]) for r in range(rows))

    start = (
        jnp.full((kv_heads, group), NEVER, jnp.float32),
        jnp.zeros((kv_heads, group), jnp.float32),
        jnp.zeros((kv_heads, group, head_dim), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, (filled + block - 1) // block, step, (start,) * rows)
    return jnp.stack([acc / jnp.where(total > 0, total, 1.0)[..., None] for _, total, acc in carry])


def _row(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, top: jax.Array, total: jax.Array, acc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores = jnp.where(visible, _scores(q, k), NEVER)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    p = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
    shrink = jnp.exp(top - new_top)
    weighted = jnp.einsum("hgt,htd->hgd", p, v, precision=jax.lax.Precision.HIGHEST)
    return new_top, total * shrink + jnp.sum(p, axis=-1), acc * shrink[..., None] + weighted


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q `[heads, group, dim]` against k `[heads, tokens, dim]` -> `[heads, group, tokens]`, a matrix-vector product each:
    XLA's CPU backend takes eight times longer for the batched product (49 against 6 microseconds at [2, 3, 128] and 256
    tokens, measured)."""
    products = [[jnp.dot(keys, row, precision=jax.lax.Precision.HIGHEST) for row in rows] for keys, rows in zip(k, q, strict=True)]
    return jnp.stack([jnp.stack(heads) for heads in products])
