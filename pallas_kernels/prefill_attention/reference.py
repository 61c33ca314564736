"""Attention of a prefill chunk over a slot's pages, its own tokens included (they are written first)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append.reference import gates
from pallas_kernels.kv_codecs import rotate, uses_rotation
from pallas_kernels.kv_pages import NEVER, PAGE, KVPages, load_block

BLOCK_PAGES = 8


def prefill_attention(
    q: jax.Array, projected: jax.Array, pool: KVPages, table: jax.Array, start: jax.Array, count: jax.Array, *, format: str
) -> jax.Array:
    """`prefill_attention.prefill_attention` in plain jnp; rows that are not valid get finite numbers."""
    tokens, query_heads, head_dim = q.shape
    out = attend(q, pool, table, start, count, format)
    gated = out.astype(projected.dtype) * jax.nn.sigmoid(gates(projected, query_heads, head_dim))
    return gated.reshape(tokens, -1)


def attend(q: jax.Array, pool: KVPages, table: jax.Array, start: jax.Array, count: jax.Array, format: str) -> jax.Array:
    """Attention without the gate, float32 `[tokens, query_heads, head_dim]`; q as `attention_inputs` gives it."""
    tokens, query_heads, head_dim = q.shape
    kv_heads = jax.tree.leaves(pool.k)[0].shape[1]
    q = q.reshape(tokens, kv_heads, -1, head_dim)
    table = jnp.pad(table, (0, -table.shape[0] % BLOCK_PAGES))
    block = BLOCK_PAGES * PAGE
    filled = start + count
    # Padding rows see what the last valid row sees, never a stale key: a NaN here would reach the delta rule's state.
    position = jnp.minimum(start + jnp.arange(tokens), filled - 1)

    def step(i: jax.Array, carry: tuple) -> tuple:
        top, total, acc = carry
        k, v = load_block(pool, jax.lax.dynamic_slice_in_dim(table, i * BLOCK_PAGES, BLOCK_PAGES), format)
        token = i * block + jnp.arange(block)
        v = jnp.where((token < filled)[:, None], v, 0.0)
        visible = (token[None, :] <= position[:, None])[None, None]
        scores = jnp.einsum("qhgd,hkd->hgqk", q, k, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(visible, scores, NEVER)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        p = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        weighted = jnp.einsum("hgqk,hkd->hgqd", p, v, precision=jax.lax.Precision.HIGHEST)
        return new_top, total * shrink + jnp.sum(p, axis=-1), acc * shrink[..., None] + weighted

    shape = (kv_heads, query_heads // kv_heads, tokens)
    carry = (jnp.full(shape, NEVER, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32))
    _, total, acc = jax.lax.fori_loop(0, (filled + block - 1) // block, step, carry)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    out = jnp.transpose(out, (2, 0, 1, 3)).reshape(tokens, query_heads, head_dim)
    return rotate(out) if uses_rotation(format) else out
