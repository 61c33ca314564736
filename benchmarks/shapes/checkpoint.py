"""A random BF16 checkpoint with the 27B's widths and vocabulary and few layers, in the published layout, shard by shard.

    python -m benchmarks.shapes.checkpoint DIR [--layers 4] [--miniature]

Names, shapes, prefix and config are those of the published files (vision tower left out), written out here and not asked
of the engine. Every tensor is drawn from its own name and the seed, so that other layer counts share tensors.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ninfer_jax.checkpoints import qwen_tokenizer, tiny_path

LINEAR, FULL = "linear_attention", "full_attention"
SHARD_BYTES = 2_600_000_000  # the embedding and the head, 2.54 GB each, have one for themselves
_POOL, _RUN = 1 << 22, 1 << 16  # normal numbers that a seed has, and how many of them in a row a tensor takes at a time
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248_044,
    "dtype": "bfloat16",
    "eos_token_id": 248_044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17_408,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248_320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
MINIATURE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "vocab_size": 1088,
    "bos_token_id": None,
    "eos_token_id": 0,
    "max_position_embeddings": 4096,
}


def text_config(layers: int, miniature: bool = False) -> dict[str, Any]:
    """`text_config` of config.json, every fourth layer full attention."""
    kinds = [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    return TEXT | {"layer_types": kinds, "num_hidden_layers": layers} | (MINIATURE if miniature else {})


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name in the files -> shape, in the order of the model."""
    c, prefix = config, "model.language_model."
    found = {f"{prefix}embed_tokens.weight": (c["vocab_size"], c["hidden_size"])}
    for i, kind in enumerate(c["layer_types"]):
        found |= {f"{prefix}layers.{i}.{name}": shape for name, shape in _layer(c, kind)}
    found |= {f"{prefix}norm.weight": (c["hidden_size"],), "lm_head.weight": (c["vocab_size"], c["hidden_size"])}
    found |= {"mtp.fc.weight": (c["hidden_size"], 2 * c["hidden_size"])}
    found |= {f"mtp.{n}.weight": (c["hidden_size"],) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return found | {f"mtp.layers.0.{name}": shape for name, shape in _layer(c, FULL)}


def _layer(c: dict[str, Any], kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield "input_layernorm.weight", (hidden,)
    if kind == LINEAR:
        key, value = (c[f"linear_num_{x}_heads"] * c[f"linear_{x}_head_dim"] for x in ("key", "value"))
        heads, width = c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
        yield "linear_attn.A_log", (heads,)
        yield "linear_attn.conv1d.weight", (2 * key + value, 1, width)
        yield "linear_attn.dt_bias", (heads,)
        for name, rows in (("a", heads), ("b", heads), ("qkv", 2 * key + value), ("z", value)):
            yield f"linear_attn.in_proj_{name}.weight", (rows, hidden)
        yield "linear_attn.norm.weight", (c["linear_value_head_dim"],)
        yield "linear_attn.out_proj.weight", (hidden, value)
    else:
        queries, pairs = (c[f"num_{x}_heads"] * c["head_dim"] for x in ("attention", "key_value"))
        yield "self_attn.k_norm.weight", (c["head_dim"],)
        yield "self_attn.k_proj.weight", (pairs, hidden)
        yield "self_attn.o_proj.weight", (hidden, queries)
        yield "self_attn.q_norm.weight", (c["head_dim"],)
        yield "self_attn.q_proj.weight", (2 * queries, hidden)  # queries and their output gates
        yield "self_attn.v_proj.weight", (pairs, hidden)
    for name, shape in (("down", (hidden, inner)), ("gate", (inner, hidden)), ("up", (inner, hidden))):
        yield f"mlp.{name}_proj.weight", shape
    yield "post_attention_layernorm.weight", (hidden,)


def nbytes(config: dict[str, Any]) -> int:
    """Of all tensors in BF16."""
    return sum(2 * math.prod(shape) for shape in tensors(config).values())


def write(path: Path, config: dict[str, Any], seed: int, shard_bytes: int = SHARD_BYTES) -> None:
    """The checkpoint, at most one shard of it in memory, with the published tokenizer (a miniature has the bundled one)."""
    path.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[]]
    size, shapes = 0, tensors(config)
    for name, shape in shapes.items():
        own = 2 * math.prod(shape)
        if shards[-1] and size + own > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: draw(name, shapes[name], seed) for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": nbytes(config)}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    write_small_files(path, config)


def write_small_files(path: Path, config: dict[str, Any]) -> None:
    """config.json and what text needs."""
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": config,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(whole, indent=2))
    if config["vocab_size"] == TEXT["vocab_size"]:
        qwen_tokenizer.build(path, "3.8")
    else:
        shutil.copy(tiny_path() / "tokenizer.json", path)


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A tensor by its name in the files, bfloat16."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.02, 2, shape)).astype(ml_dtypes.bfloat16)
    if name.endswith("linear_attn.norm.weight"):
        return rng.uniform(0.5, 1.5, shape).astype(ml_dtypes.bfloat16)
    if len(shape) == 1:  # norms, zero-centred, and dt_bias
        return rng.normal(0, 1 if name.endswith("dt_bias") else 0.3, shape).astype(ml_dtypes.bfloat16)
    if "embed_tokens" in name or "conv1d" in name:
        size = 1.0 if "embed_tokens" in name else 0.5
    else:  # what is added to the residual stream is smaller, so that no layer drowns the others
        size = shape[-1] ** -0.5 * (0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1)
    drawn, pool = np.empty(math.prod(shape), ml_dtypes.bfloat16), _normal(seed)
    for at in range(0, drawn.size, _RUN):
        # Runs from random places instead of numbers of their own: 4.5 billion of them would take most of the time.
        start, count = rng.integers(_POOL - _RUN), min(_RUN, drawn.size - at)
        drawn[at : at + count] = pool[start : start + count] * np.float32(size)
    return drawn.reshape(shape)


@functools.cache
def _normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(_POOL, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.path, text_config(options.layers, options.miniature), options.seed)


if __name__ == "__main__":
    main()
