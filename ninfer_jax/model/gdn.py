"""Gated DeltaNet mixer: parameters and projections; the recurrence itself is the caller's (it owns the state)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.config import ModelConfig, Recipe
from ninfer_jax.model.layers import RMSNorm, describe, pair, projection

# From `projected` `[tokens, channels + values]` (raw convolution inputs, gate z) and `ab` `[tokens, 2 * value_heads]` to
# gated outputs `[tokens, value_heads * value_dim]`.
Recur = Callable[[jax.Array, jax.Array], jax.Array]


class Conv(nnx.Module):
    """Taps of the depthwise convolution, `[channels, 1, width]` as checkpoints store them."""

    def __init__(self, channels: int, width: int):
        self.weight = describe((channels, 1, width), jnp.float32, "conv")


class GatedNorm(nnx.Module):
    """Weight of the delta rule's output norm, `[value_dim]`, shared by heads."""

    def __init__(self, size: int):
        self.weight = describe((size,), jnp.float32, "norm")


class Constants(NamedTuple):
    """Weights that the core of a layer takes beside activations and state: taps float32 `[channels, 1, width]`, a_log and dt_bias
    float32 `[value_heads]`, norm float32 `[value_dim]`."""

    taps: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array


class GatedDeltaNet(nnx.Module):
    """Linear attention with a float32 matrix state a value head; value head h shares key head h // (Hv / Hk)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, recipe: Recipe | None):
        self.heads = (config.gdn_key_heads, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim)
        self.eps = config.rms_norm_eps
        hidden, heads = config.hidden_size, config.gdn_value_heads
        values = heads * config.gdn_value_dim
        self.in_proj = projection(hidden, {"in_proj_qkv": config.conv_channels, "in_proj_z": values}, dtype, "gdn", recipe)
        self.gate_proj = projection(hidden, {"in_proj_a": heads, "in_proj_b": heads}, dtype, "gdn_gate", recipe)
        self.conv1d = Conv(config.conv_channels, config.conv_width)
        self.A_log = describe((heads,), jnp.float32, "gdn_gate")
        self.dt_bias = describe((heads,), jnp.float32, "gdn_gate")
        self.norm = GatedNorm(config.gdn_value_dim)
        self.out_proj = projection(values, hidden, dtype, "gdn", recipe)

    def __call__(self, h: jax.Array, norm: RMSNorm, recur: Recur) -> jax.Array:
        """h `[tokens, hidden]` plus the mixer over its norm."""
        return self.out_proj(recur(*pair(self.in_proj, self.gate_proj, h, norm)), residual=h)

    @property
    def constants(self) -> Constants:
        return Constants(self.conv1d.weight[...], self.A_log[...], self.dt_bias[...], self.norm.weight[...])
