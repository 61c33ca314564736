"""Attention's inputs in plain jnp: norms, partial RoPE, the stored basis, and the write into pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_codecs import rotate, uses_rotation
from pallas_kernels.kv_pages import KVPages, append
from pallas_kernels.norms import rms_norm


class Heads(NamedTuple):
    """q and gate `[tokens, query_heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`; q and k normed and turned."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the leading dims of x `[tokens, heads, head_dim]`: rotate-half pairs (i, i + rotary_dim / 2)."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def split_heads(
    projected: jax.Array, q_norm: jax.Array, k_norm: jax.Array, cos: jax.Array, sin: jax.Array, kv_heads: int, eps: float
) -> Heads:
    """The heads in `projected` `[tokens, (2 query_heads + 2 kv_heads) head_dim]`: `[query | gate]` per query head, then all
    keys, then all values."""
    tokens, width = projected.shape
    head_dim = q_norm.shape[0]
    keys = kv_heads * head_dim
    queries = width - 2 * keys
    q, gate = jnp.split(projected[:, :queries].reshape(tokens, -1, 2 * head_dim), 2, axis=-1)
    k = projected[:, queries : queries + keys].reshape(tokens, kv_heads, head_dim)
    v = projected[:, queries + keys :].reshape(tokens, kv_heads, head_dim)
    q, k = (apply_rotary(rms_norm(x, w, eps), cos, sin) for x, w in ((q, q_norm), (k, k_norm)))
    return Heads(q, k, v, gate)


def gates(projected: jax.Array, query_heads: int, head_dim: int) -> jax.Array:
    """The gate columns of `projected`, `[tokens, query_heads, head_dim]`."""
    queries = projected[:, : 2 * query_heads * head_dim]
    return queries.reshape(-1, query_heads, 2 * head_dim)[..., head_dim:]


def attention_inputs(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    *,
    format: str,
    eps: float,
) -> tuple[jax.Array, KVPages]:
    """`kv_append.attention_inputs` in plain jnp."""
    kv_heads = jax.tree.leaves(pool.k)[0].shape[1]
    heads = split_heads(projected, q_norm, k_norm, cos, sin, kv_heads, eps)
    pool = append(pool, heads.k, heads.v, table, positions, format)
    q = heads.q.astype(jnp.float32) * heads.q.shape[-1] ** -0.5
    return rotate(q) if uses_rotation(format) else q, pool
