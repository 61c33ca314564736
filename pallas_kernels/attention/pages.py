"""The page pool of one layer: 64 tokens a page, page -> KV head -> token -> code, addressed through block tables.

Page 0 belongs to nobody. Block-table entries that own no page hold 0, so rows without a home (padding, empty slots,
drafts beyond the context) are written there and never read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_codecs import Packed, decode_stored, encode, packed_struct

PAGE = 64


class KVPages(NamedTuple):
    """Packed keys and values of one layer, leaves `[pages, kv_heads, 64, ...]`."""

    k: Packed
    v: Packed


def pages_struct(format: str, pages: int, kv_heads: int, head_dim: int) -> KVPages:
    """Shapes and dtypes of a pool of `pages` pages."""
    lead = (pages, kv_heads, PAGE)
    return KVPages(packed_struct(format, "k", lead, head_dim), packed_struct(format, "v", lead, head_dim))


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
        return target.at[page, :, offset].set(rows, mode="promise_in_bounds")

    return KVPages(
        jax.tree.map(write, pool.k, encode(k, format, "k")), jax.tree.map(write, pool.v, encode(v, format, "v"))
    )


def load_block(pool: KVPages, pages: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """Decoded keys and values of `pages` int32 `[n]`, float32 `[kv_heads, n * 64, head_dim]`, in the stored basis."""

    def gather(part: Packed, name: str) -> jax.Array:
        taken = jax.tree.map(lambda leaf: jnp.swapaxes(leaf[pages], 0, 1), part)
        values = decode_stored(taken, format, name)
        return values.reshape(values.shape[0], -1, values.shape[-1])

    return gather(pool.k, "k"), gather(pool.v, "v")


def read_tokens(pool: KVPages, table: jax.Array, tokens: int) -> KVPages:
    """The packed keys and values of a slot's first `tokens` tokens, leaves `[tokens, kv_heads, ...]`; for inspection."""

    def read(leaf: jax.Array) -> jax.Array:
        pages = leaf[table[: -(-tokens // PAGE)]]
        return jnp.swapaxes(pages, 1, 2).reshape(-1, *pages.shape[1:2], *pages.shape[3:])[:tokens]

    return jax.tree.map(read, pool)
