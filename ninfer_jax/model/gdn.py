"""Gated DeltaNet mixer: projections, gates and output; the recurrence itself is the caller's (it owns the state)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.config import ModelConfig
from ninfer_jax.model.layers import GatedNorm, Linear, describe
from pallas_kernels.delta_rule import causal_conv, decay_and_beta, split_qkv


class Mixed(NamedTuple):
    """Per token: raw convolution input `[tokens, channels]`, gate z `[tokens, value_heads, value_dim]`, log-decay g and
    beta float32 `[tokens, value_heads]`."""

    raw: jax.Array
    z: jax.Array
    g: jax.Array
    beta: jax.Array


class Conv(nnx.Module):
    """Taps of the depthwise convolution, `[channels, 1, width]` as checkpoints store them."""

    def __init__(self, channels: int, width: int):
        self.weight = describe((channels, 1, width), jnp.float32, "conv")


class GatedDeltaNet(nnx.Module):
    """Linear attention with a float32 matrix state a value head; value head h shares key head h // (Hv / Hk)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.heads = (config.gdn_key_heads, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim)
        hidden, values = config.hidden_size, config.gdn_value_heads * config.gdn_value_dim
        self.in_proj_qkv = Linear(hidden, config.conv_channels, dtype, "gdn")
        self.in_proj_z = Linear(hidden, values, dtype, "gdn")
        self.in_proj_b = Linear(hidden, config.gdn_value_heads, dtype, "gdn_gate")
        self.in_proj_a = Linear(hidden, config.gdn_value_heads, dtype, "gdn_gate")
        self.conv1d = Conv(config.conv_channels, config.conv_width)
        self.A_log = describe((config.gdn_value_heads,), jnp.float32, "gdn_gate")
        self.dt_bias = describe((config.gdn_value_heads,), jnp.float32, "gdn_gate")
        self.norm = GatedNorm(config.gdn_value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, hidden, dtype, "gdn")

    def project(self, x: jax.Array) -> Mixed:
        """x `[tokens, hidden]`."""
        _, value_heads, _, value_dim = self.heads
        g, beta = decay_and_beta(self.in_proj_a(x), self.in_proj_b(x), self.A_log[...], self.dt_bias[...])
        return Mixed(self.in_proj_qkv(x), self.in_proj_z(x).reshape(-1, value_heads, value_dim), g, beta)

    def convolve(self, window: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Raw inputs `[..., width - 1 + tokens, channels]`, the old ones first -> q, k, v of the tokens (float32)."""
        mixed = causal_conv(window, self.conv1d.weight[...]).astype(window.dtype)
        return split_qkv(mixed, *self.heads)

    def output(self, out: jax.Array, z: jax.Array) -> jax.Array:
        """Delta-rule output float32 `[tokens, value_heads, value_dim]` -> `[tokens, hidden]`."""
        gated = self.norm(out, z, z.dtype)
        return self.out_proj(gated.reshape(gated.shape[0], -1))
