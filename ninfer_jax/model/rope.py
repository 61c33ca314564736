"""Partial rotary embedding with interleaved multimodal sections (three position axes, equal for text)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.config import ModelConfig
from pallas_kernels.rotary import cos_sin


def axis_of_frequency(config: ModelConfig) -> np.ndarray:
    """The position axis (0 time, 1 height, 2 width) that turns frequency i, int `[rotary_dim / 2]`.

    Interleaved sections [t, h, w]: frequency i reads height where i % 3 == 1 and i < 3h, width where i % 3 == 2 and
    i < 3w, time elsewhere.
    """
    i = np.arange(config.rotary_dim // 2)
    _, height, width = config.mrope_section
    axis = np.zeros_like(i)
    axis[(i % 3 == 1) & (i < 3 * height)] = 1
    axis[(i % 3 == 2) & (i < 3 * width)] = 2
    return axis


def rotary(positions: jax.Array, config: ModelConfig, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[tokens, rotary_dim / 2]` for positions int32 `[3, tokens]`; angles in float32, values in `dtype`."""
    half = config.rotary_dim // 2
    inverse = (1.0 / config.rope_theta ** (np.arange(half, dtype=np.float64) * 2 / config.rotary_dim)).astype(np.float32)
    chosen = positions.astype(jnp.float32)[axis_of_frequency(config)].T
    return cos_sin(chosen * inverse, dtype)
