"""GGUF files of architecture `qwen35`: one file, or the parts of a split one; config and tokenizer lie beside them, or are
rebuilt from the file's own metadata."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from ninfer_jax.checkpoints.qwen_tokenizer import tokenizer_json
from ninfer_jax.checkpoints.safetensors_file import CheckpointError
from ninfer_jax.checkpoints.sources.gguf_tensors import Heads, gguf_tensors
from ninfer_jax.checkpoints.sources.source import Source

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BROKEN = (ValueError, KeyError, IndexError, OverflowError, TypeError, struct.error, UnicodeDecodeError)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types


def open_gguf(file: Path, beside: Mapping[str, bytes], config: Mapping[str, Any] | None) -> Source:
    """config, beside: config.json and the other files of the directory, as far as there are any. CheckpointError for a
    damaged file, another architecture, missing parts, and metadata that do not suffice."""
    files = _parts(file)
    readers = {part: _reader(part) for part in files}
    fields = {name: field for reader in readers.values() for name, field in reader.fields.items()}
    meta = Metadata(file, fields)
    architecture = meta.get("general.architecture")
    if architecture != "qwen35":
        raise CheckpointError(f"{file}: GGUF architecture is {architecture}, supported is qwen35")
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for reader in readers.values() for t in reader.tensors}
    layers = meta.own("block_count") - meta.get("qwen35.nextn_predict_layers", 0)
    value_heads = meta.own("ssm.time_step_rank")
    heads = Heads(meta.own("ssm.group_count"), value_heads, meta.own("ssm.state_size"), meta.own("ssm.inner_size") // value_heads)
    if heads.values % heads.keys:
        raise CheckpointError(f"{file}: {heads.values} value heads are no multiple of {heads.keys} key heads")
    tensors = gguf_tensors(readers, layers, heads)
    rebuilt = {} if "tokenizer.json" in beside else meta.companions()
    return Source(
        file,
        "GGUF " + "+".join(sorted({t.tensor_type.name for r in readers.values() for t in r.tensors})),
        meta.config(layers, heads, shapes) if config is None else config,
        {**rebuilt, **beside},
        files,
        tensors,
    )


def _parts(file: Path) -> tuple[Path, ...]:
    split = _PART.fullmatch(file.name)
    if split is None:
        return (file,)
    stem, _, count = split.groups()
    parts = tuple(file.with_name(f"{stem}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count)))
    missing = [p.name for p in parts if not p.is_file()]
    if missing:
        raise CheckpointError(f"{file.parent} lacks {missing[0]}, a part of {stem}: fetch it")
    return parts


def _reader(file: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(file)
    except _BROKEN as error:
        raise CheckpointError(
            f"{file} is not a whole GGUF file ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, file: Path, fields: Mapping[str, gguf.ReaderField]):
        self._file, self._fields = file, fields

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def own(self, key: str) -> Any:
        """A key of the architecture; CheckpointError if it is missing."""
        value = self.get(f"qwen35.{key}")
        if value is None:
            raise CheckpointError(f"{self._file}: metadata lack qwen35.{key}")
        return value

    def config(self, layers: int, heads: Heads, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """What config.json would say."""
        for key in ("rope.scaling.type", "rope.scaling.factor"):
            if self.get(f"qwen35.{key}") not in (None, "none", 1.0):
                raise CheckpointError(f"{self._file}: {key} {self.get(f'qwen35.{key}')} is not supported")
        head_dim, rotary = self.own("attention.key_length"), self.own("rope.dimension_count")
        kinds = ["linear_attention" if f"blk.{i}.ssm_a" in shapes else "full_attention" for i in range(layers)]
        if "token_embd.weight" not in shapes:
            raise CheckpointError(f"{self._file} lacks token_embd.weight")
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": shapes["token_embd.weight"][0],
            "hidden_size": self.own("embedding_length"),
            "intermediate_size": self.own("feed_forward_length"),
            "num_hidden_layers": layers,
            "layer_types": kinds,
            "num_attention_heads": self.own("attention.head_count"),
            "num_key_value_heads": self.own("attention.head_count_kv"),
            "head_dim": head_dim,
            "linear_num_key_heads": heads.keys,
            "linear_num_value_heads": heads.values,
            "linear_key_head_dim": heads.key_dim,
            "linear_value_head_dim": heads.value_dim,
            "linear_conv_kernel_dim": self.own("ssm.conv_kernel"),
            "rms_norm_eps": float(f"{self.own('attention.layer_norm_rms_epsilon'):.6g}"),  # a float32 there
            "max_position_embeddings": self.own("context_length"),
            "tie_word_embeddings": "output.weight" not in shapes,
            "mtp_num_hidden_layers": self.get("qwen35.nextn_predict_layers", 0),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.own("rope.freq_base"),
                "partial_rotary_factor": rotary / head_dim,
                "mrope_section": list(self.own("rope.dimension_sections"))[:3],
            },
        }

    def companions(self) -> dict[str, bytes]:
        """tokenizer.json, generation_config.json and chat_template.jinja, as far as the file has what they need."""
        tokens, types, merges = (self.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
        if not (tokens and types and merges) or self.get("tokenizer.ggml.pre") != "qwen35" or len(types) != len(tokens):
            raise CheckpointError(f"{self._file}: no tokenizer of kind qwen35 inside; put tokenizer.json beside it")
        vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
        content = tokenizer_json(vocab, [], [], 0)
        content["model"]["merges"] = list(merges)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content["added_tokens"] = [
            {"id": i, "content": token, **flags, "special": kind == CONTROL}
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ]
        files = {"tokenizer.json": json.dumps(content, ensure_ascii=False).encode()}
        ends = [self.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        ends += [tokens.index(t) for t in ("<|im_end|>", "<|endoftext|>") if t in tokens]
        generation: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(e for e in ends if e is not None))}
        for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
            value = self.get(f"general.sampling.{key}")
            if value is not None:
                generation[name] = round(value, 6)
        files["generation_config.json"] = json.dumps(generation).encode()
        template = self.get("tokenizer.chat_template")
        return files | ({} if template is None else {"chat_template.jinja": template.encode()})
