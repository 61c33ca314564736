"""The page pool of one layer: 64 tokens a page, page -> KV head -> token -> code, addressed through block tables.

Page 0 belongs to nobody. Block-table entries that own no page hold 0, so rows without a home (padding, empty slots,
drafts beyond the context) are written there and never read.

Pools are gathered from and scattered into in place; nothing ever reads or writes all of one. For that, bfloat16 codes
are kept as uint16 words: XLA's CPU compiler writes into a bfloat16 array by turning all of it into float32 and back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_codecs import Packed, decode_stored, encode, packed_struct
from pallas_kernels.kv_formats import PAGE

NEVER = -1e30  # an attention score below every real one; finite, so that a page that is masked whole gives no NaN


class KVPages(NamedTuple):
    """Packed keys and values of one layer, leaves `[pages, kv_heads, 64, ...]`; bfloat16 codes as uint16 words."""

    k: Packed
    v: Packed


def pages_struct(format: str, pages: int, kv_heads: int, head_dim: int) -> KVPages:
    """Shapes and dtypes of a pool of `pages` pages."""
    lead = (pages, kv_heads, PAGE)
    packed = KVPages(packed_struct(format, "k", lead, head_dim), packed_struct(format, "v", lead, head_dim))
    return jax.eval_shape(lambda pool: jax.tree.map(_to_pages, pool), packed)


def append(pool: KVPages, k: jax.Array, v: jax.Array, table: jax.Array, positions: jax.Array, format: str) -> KVPages:
    """Encode k and v `[tokens, kv_heads, head_dim]` and write them in place (donate the pool).

    table int32 `[tokens, pages_per_slot]`, or `[pages_per_slot]` shared by all tokens; positions int32 `[tokens]`
    inside the slot. A negative position, or one beyond the table, goes to page 0.
    """
    with_page = (positions >= 0) & (positions < table.shape[-1] * PAGE)
    index = jnp.where(with_page, positions, 0) // PAGE
    own = table[index] if table.ndim == 1 else jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    page = jnp.where(with_page, own, 0)
    offset = jnp.where(with_page, positions, 0) % PAGE

    def write(target: jax.Array, rows: jax.Array) -> jax.Array:
        return target.at[page, :, offset].set(_to_pages(rows), mode="promise_in_bounds")

    return KVPages(jax.tree.map(write, pool.k, encode(k, format, "k")), jax.tree.map(write, pool.v, encode(v, format, "v")))


def load_block(pool: KVPages, pages: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """Decoded keys and values of `pages` int32 `[n]`, float32 `[kv_heads, n * 64, head_dim]`, in the stored basis."""

    def gather(part: Packed, name: str) -> jax.Array:
        taken = jax.tree.map(lambda leaf: jnp.swapaxes(_from_pages(leaf[pages]), 0, 1), part)
        values = decode_stored(taken, format, name)
        return values.reshape(values.shape[0], -1, values.shape[-1])

    return gather(pool.k, "k"), gather(pool.v, "v")


def read_tokens(pool: KVPages, table: jax.Array, tokens: int) -> KVPages:
    """The packed keys and values of a slot's first `tokens` tokens, leaves `[tokens, kv_heads, ...]`; for inspection."""

    def read(leaf: jax.Array) -> jax.Array:
        pages = _from_pages(leaf[table[: -(-tokens // PAGE)]])
        return jnp.swapaxes(pages, 1, 2).reshape(-1, *pages.shape[1:2], *pages.shape[3:])[:tokens]

    return jax.tree.map(read, pool)


def _to_pages(leaf: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16) if leaf.dtype == jnp.bfloat16 else leaf


def _from_pages(leaf: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf
