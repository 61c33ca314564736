"""Gated full attention: parameters and projections; the walk over keys and values is the caller's (it owns the pages)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.config import ModelConfig, Recipe
from ninfer_jax.model.layers import RMSNorm, projection
from pallas_kernels.kv_append import Heads, attention_inputs, split_heads
from pallas_kernels.kv_pages import KVPages

# From the projections `[tokens, (2 query_heads + 2 kv_heads) head_dim]` to gated values `[tokens, query_heads * head_dim]`.
Attend = Callable[[jax.Array], jax.Array]


class Attention(nnx.Module):
    """Grouped-query attention with per-head `[query | gate]` rows in q_proj, QK norms and a sigmoid output gate."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, role: str, recipe: Recipe | None):
        d, hq, hkv = config.head_dim, config.query_heads, config.kv_heads
        self.query_heads, self.kv_heads, self.eps = hq, hkv, config.rms_norm_eps
        heads = {"q_proj": 2 * hq * d, "k_proj": hkv * d, "v_proj": hkv * d}
        self.qkv_proj = projection(config.hidden_size, heads, dtype, role, recipe)
        self.o_proj = projection(hq * d, config.hidden_size, dtype, role, recipe)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def __call__(self, h: jax.Array, norm: RMSNorm, attend: Attend) -> jax.Array:
        """h `[tokens, hidden]` plus attention over its norm."""
        return self.o_proj(attend(self.qkv_proj(h, norm=norm)), residual=h)

    def inputs(
        self, projected: jax.Array, cos: jax.Array, sin: jax.Array, pool: KVPages, table: jax.Array, positions: jax.Array, kv: str
    ) -> tuple[jax.Array, KVPages]:
        """Queries in the basis of the pages, and the pool with the tokens' keys and values; see `attention_inputs`."""
        norms = self.q_norm.weight[...], self.k_norm.weight[...]
        return attention_inputs(projected, *norms, cos, sin, pool, table, positions, format=kv, eps=self.eps)

    def heads(self, projected: jax.Array, cos: jax.Array, sin: jax.Array) -> Heads:
        """The same without pages."""
        norms = self.q_norm.weight[...], self.k_norm.weight[...]
        return split_heads(projected, *norms, cos, sin, self.kv_heads, self.eps)
