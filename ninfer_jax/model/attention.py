"""Gated full attention: everything but the walk over keys and values, which the caller supplies."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.config import ModelConfig
from ninfer_jax.model.layers import Linear, RMSNorm
from ninfer_jax.model.rope import apply_rotary


class Heads(NamedTuple):
    """q and gate `[tokens, query_heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`; q and k normed and turned."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array


class Attention(nnx.Module):
    """Grouped-query attention with per-head `[query | gate]` rows in q_proj, QK norms and a sigmoid output gate."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, role: str):
        d, hq, hkv = config.head_dim, config.query_heads, config.kv_heads
        self.head_dim, self.query_heads, self.kv_heads = d, hq, hkv
        self.q_proj = Linear(config.hidden_size, 2 * hq * d, dtype, role)
        self.k_proj = Linear(config.hidden_size, hkv * d, dtype, role)
        self.v_proj = Linear(config.hidden_size, hkv * d, dtype, role)
        self.o_proj = Linear(hq * d, config.hidden_size, dtype, role)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> Heads:
        """x `[tokens, hidden]` -> heads."""
        q, gate = jnp.split(self.q_proj(x).reshape(-1, self.query_heads, 2 * self.head_dim), 2, axis=-1)
        k, v = self.keys_values(x, cos, sin)
        return Heads(apply_rotary(self.q_norm(q), cos, sin), k, v, gate)

    def keys_values(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Only what the cache needs of x: k and v."""
        k = self.k_proj(x).reshape(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(-1, self.kv_heads, self.head_dim)
        return apply_rotary(self.k_norm(k), cos, sin), v

    def output(self, attended: jax.Array, gate: jax.Array) -> jax.Array:
        """attended float32 `[tokens, query_heads, head_dim]` -> `[tokens, hidden]`."""
        gated = attended.astype(gate.dtype) * jax.nn.sigmoid(gate)
        return self.o_proj(gated.reshape(gated.shape[0], -1))
