"""Engines of the bundled model, loaded once a session, and small checkpoints of random weights to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import save_checkpoint, tiny_path
from ninfer_jax.config import ModelConfig
from ninfer_jax.model import TextModel, parameter_specs

# The smallest geometry that has every kind of tensor. The vocabulary has to hold the bundled tokenizer's 1,024 ids.
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


@pytest.fixture(scope="session")
def plain_engine() -> Engine:
    """One slot, no drafts, f32 pages, 512 tokens."""
    return Engine.load(tiny_path(), EngineConfig(context=512, prefill_chunk=64, kv="f32"))


@pytest.fixture(scope="session")
def draft_engine() -> Engine:
    """Two slots, three drafts a round, f32 pages, 512 tokens."""
    return Engine.load(tiny_path(), EngineConfig(context=512, prefill_chunk=64, kv="f32", slots=2, draft=3))


@pytest.fixture(scope="session")
def random_tensors() -> Mapping[str, np.ndarray]:
    """Canonical name -> float32 array: every tensor that `CONFIG` asks for."""
    rng = np.random.default_rng(5)
    specs = parameter_specs(TextModel(ModelConfig.from_hf(CONFIG), jnp.float32, mtp=True))
    return {spec.name: rng.normal(0, 0.05, spec.shape).astype(np.float32) for spec in specs}


@pytest.fixture(scope="session")
def micro_config() -> dict[str, Any]:
    """The config.json of `random_tensors`."""
    return CONFIG


@pytest.fixture
def checkpoint_dir(tmp_path: Path, random_tensors: Mapping[str, np.ndarray]) -> Callable[..., Path]:
    """Writes a complete checkpoint directory; each call a fresh one.

    config: keys of config.json to change. tensors: arrays to add or replace, or None to leave one out. shard_bytes: as
    for `save_checkpoint`.
    """
    count = 0

    def write(
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray | None] | None = None,
        shard_bytes: int | None = None,
    ) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"checkpoint{count}"
        wanted = {name: array for name, array in {**random_tensors, **(tensors or {})}.items() if array is not None}
        save_checkpoint(folder, wanted, {**CONFIG, **(config or {})}, shard_bytes=shard_bytes)
        for name in COPIED:
            shutil.copy(tiny_path() / name, folder / name)
        return folder

    return write
