"""Geometries known without a checkpoint at hand, for planning and compiling. Source: the published config.json files."""

from __future__ import annotations

import re
from dataclasses import replace

from ninfer_jax.config.model import FULL, LINEAR, ModelConfig

_QWEN_27B = ModelConfig(
    vocab_size=248_320,
    hidden_size=5120,
    intermediate_size=17_408,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 16,
    query_heads=24,
    kv_heads=4,
    head_dim=256,
    rotary_dim=64,
    rope_theta=1e7,
    mrope_section=(11, 11, 10),
    gdn_key_heads=16,
    gdn_value_heads=48,
    gdn_key_dim=128,
    gdn_value_dim=128,
    conv_width=4,
    rms_norm_eps=1e-6,
    max_positions=262_144,
    tied_embeddings=False,
    mtp_layers=1,
)

# Ids that the releases' tokenizer names; the rows of the matrices beyond are padding.
NAMED_IDS = 248_077
# The two releases share every shape; weights, tokenizer additions and chat template differ.
PRESETS: dict[str, ModelConfig] = {"qwen3_6_27b": _QWEN_27B, "qwen3_8_27b": replace(_QWEN_27B)}


def preset_called(text: str) -> str | None:
    """The name of the preset that is meant by `text`, whatever its case, dots, dashes and underscores; None for none."""
    found = re.sub(r"[._ -]", "_", text.casefold())
    return found if found in PRESETS else None


def preset(name: str) -> ModelConfig:
    """The geometry called `name` in any spelling; ValueError lists the known names."""
    if (found := preset_called(name)) is None:
        raise ValueError(f"preset {name!r} is unknown, known are {', '.join(PRESETS)}")
    return PRESETS[found]
