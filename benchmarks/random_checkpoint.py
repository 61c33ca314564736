"""A random float32 hybrid checkpoint with 149M parameters (158M with the MTP head), in the Hugging Face layout that every peer
reads.

Speed depends on shapes and not on what a model has learnt, so a seed replaces a download. The tokenizer spells almost
every id in ASCII: llama.cpp's server holds back tokens that end inside a UTF-8 sequence.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ninfer_jax.checkpoints import save_checkpoint
from ninfer_jax.config import ModelConfig
from ninfer_jax.model import TextModel, parameter_specs

VOCAB = 32_768
_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attn_output_gate": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "bos_token_id": None,
    "eos_token_id": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
# For tests: four layers, 9 MB, most of it the vocabulary that the tokenizer spells.
_TINY = _CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": _CONFIG["layer_types"][:4],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": _CONFIG["rope_parameters"] | {"mrope_section": [3, 3, 2]},
}
SIZES = {"150m": _CONFIG, "tiny": _TINY}


def make_checkpoint(cache: Path, seed: int, size: str = "150m") -> Path:
    """The checkpoint's directory under `cache`, written on the first call (631 MB; size "tiny": 9 MB)."""
    path, config = cache / f"random-hybrid-{size}-seed{seed}", SIZES[size]
    if (path / "complete").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    specs = parameter_specs(TextModel(ModelConfig.from_hf(config), jnp.float32, mtp=True))
    save_checkpoint(path, {s.name: _draw(s.name, s.shape, rng) for s in specs}, config)
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": None, "model_max_length": 32_768}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (path / "complete").touch()
    return path


def prompt_ids(tokens: int, seed: int) -> list[int]:
    """Random ids, none of them a single byte or the end token."""
    return np.random.default_rng([seed, tokens]).integers(257, VOCAB, tokens).tolist()


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        return rng.uniform(-5, 1, shape).astype(np.float32)
    if name.endswith("linear_attn.norm.weight"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) == 1:  # zero-centred norms
        return rng.uniform(-0.3, 0.3, shape).astype(np.float32)
    values = rng.standard_normal(shape, np.float32) * (0.3 if "conv1d" in name else shape[-1] ** -0.5)
    if name == "lm_head.weight":
        values[:257] = 0.0  # single bytes and the end token lose every greedy choice
    return values


def _tokenizer() -> dict:
    """Byte-level BPE: 256 bytes, the end token, all pairs of printable ASCII characters, then triples of letters."""
    printable = [chr(c) for c in range(33, 127)]
    shifted = [chr(c) if 33 <= c <= 126 or 161 <= c <= 172 or c >= 174 else None for c in range(256)]
    spare = iter(range(256, 512))
    alphabet = [c or chr(next(spare)) for c in shifted]  # the usual byte-level stand-ins for the other bytes
    pairs = list(product(printable, printable))
    room = VOCAB - 257 - len(pairs)
    triples = list(islice(((a + b, c) for (a, b), c in product(pairs, printable) if (a + b + c).isalpha()), room))
    tokens = [*alphabet, "<|end|>", *(a + b for a, b in pairs + triples)]
    end = {
        "id": 256,
        "content": "<|end|>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        # The end token too: the library gives an added token that is not in here the next free id, whatever its own says.
        "vocab": {t: i for i, t in enumerate(tokens)},
        "merges": [list(m) for m in pairs + triples],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
