"""A checkpoint of the smallest geometry that has every kind of tensor, with random weights: for all that needs no language."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ninfer_jax.checkpoints import save_checkpoint, tiny_path
from ninfer_jax.config import ModelConfig
from ninfer_jax.model import TextModel, parameter_specs

# The vocabulary has to hold the bundled tokenizer's 1,024 ids.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1088,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
}
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def draw() -> dict[str, np.ndarray]:
    """Canonical name -> float32 array: every tensor that `CONFIG` asks for, the same each time.

    Embeddings are large beside what the layers add, and the MTP head hands the next token's on as they are: so it guesses
    some of what the model says next, and not all.
    """
    rng = np.random.default_rng(5)
    specs = parameter_specs(TextModel(ModelConfig.from_hf(CONFIG), jnp.float32, mtp=True))
    tensors = {spec.name: rng.normal(0, 0.05, spec.shape).astype(np.float32) for spec in specs}
    tensors["embed_tokens.weight"] *= 20
    tensors["mtp.fc.weight"][:, : CONFIG["hidden_size"]] += np.eye(CONFIG["hidden_size"], dtype=np.float32)
    return tensors


def write(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None, shard_bytes: int | None = None
) -> Path:
    """The directory of a checkpoint with the bundled tokenizer; `config` changes keys of `CONFIG`."""
    save_checkpoint(folder, tensors, {**CONFIG, **(config or {})}, shard_bytes=shard_bytes)
    for name in COPIED:
        shutil.copy(tiny_path() / name, folder / name)
    return folder
