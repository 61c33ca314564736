"""GGUF files of architecture `qwen35`: one file, or the parts of a split one. Config, tokenizer and chat template are rebuilt
from the file's own metadata; what lies beside it comes first, for as much as it says."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from ninfer_jax.checkpoints.checkpoint import some_names
from ninfer_jax.checkpoints.mtp import PREFIX, unlike_one_layer
from ninfer_jax.checkpoints.qwen_tokenizer import tokenizer_json
from ninfer_jax.checkpoints.safetensors_file import CheckpointError
from ninfer_jax.checkpoints.sources.gguf_tensors import VISION, Heads, gguf_tensors
from ninfer_jax.checkpoints.sources.source import Source, SourceTensor

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NEXTN = re.compile(r"blk\.(\d+)\.nextn\.")
_BROKEN = (ValueError, KeyError, IndexError, OverflowError, TypeError, struct.error, UnicodeDecodeError)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types
NEXTN = "qwen35.nextn_predict_layers"


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
    layers, value_heads = _trunk(meta, shapes), meta.own("ssm.time_step_rank")
    heads = Heads(
        meta.own("ssm.group_count"),
        value_heads,
        meta.own("ssm.state_size"),
        meta.own("ssm.inner_size") // value_heads,
        meta.get("qwen35.ssm.v_head_reordered", True),
    )
    if heads.values % heads.keys:
        raise CheckpointError(f"{file}: {heads.values} value heads are no multiple of {heads.keys} key heads")
    tensors = gguf_tensors(readers, layers, heads)
    _check_mtp(file, meta, tensors)
    notes: list[str] = []
    skipped = [name for name in shapes if name.startswith(VISION)]
    if skipped:
        notes.append(f"{len(skipped)} tensors of the vision tower are left out ({some_names(skipped, 2)})")
    return Source(
        file,
        "GGUF " + "+".join(sorted({t.tensor_type.name for r in readers.values() for t in r.tensors if t.name not in skipped})),
        _config(file, meta, layers, heads, shapes, config, notes),
        {**meta.companions(beside), **beside},
        files,
        tensors,
        tuple(notes),
    )


def _trunk(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The number of decoder layers, blocks of the MTP layer not counted: these hold `nextn.*`, whether the metadata say so
    or not."""
    blocks, stated = meta.own("block_count"), meta.get(NEXTN)
    holders = sorted({int(found[1]) for name in shapes if (found := _NEXTN.match(name))})
    if not holders:
        return blocks - (stated or 0)
    if stated is not None and stated != len(holders) and holders[0] < blocks:
        raise CheckpointError(f"{meta.file}: {NEXTN} is {stated}, but blocks {holders} hold an MTP layer (nextn.*)")
    if holders[0] not in (blocks - len(holders), blocks):
        raise CheckpointError(f"{meta.file}: blocks {holders} hold an MTP layer (nextn.*), needed are the last of {blocks}")
    return holders[0]


def _check_mtp(file: Path, meta: Metadata, tensors: Mapping[str, SourceTensor]) -> None:
    """CheckpointError for half an MTP layer of which the metadata say nothing."""
    wrong = unlike_one_layer(tensors) if meta.get(NEXTN) is None and any(n.startswith(PREFIX) for n in tensors) else ""
    if wrong:
        raise CheckpointError(f"{file}: metadata lack {NEXTN}, and the MTP layer's tensors {wrong}")


def _config(
    file: Path,
    meta: Metadata,
    layers: int,
    heads: Heads,
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Any] | None,
    notes: list[str],
) -> Mapping[str, Any]:
    """config.json beside the file, completed from the metadata: they have all that it can lack."""
    try:
        own = meta.config(layers, heads, shapes)
    except CheckpointError:
        if given is None:
            raise
        return given  # whether that suffices, its reader says
    return own if given is None else completed(given, own, file.name, notes)


def completed(given: Mapping[str, Any], own: Mapping[str, Any], file: str, notes: list[str]) -> dict[str, Any]:
    """The config `given` with what it lacks of `own`, which the metadata of `file` say. Where they differ, `given` counts;
    notes are taken of both."""
    inner = given.get("text_config")
    text = dict(inner if isinstance(inner, Mapping) else given)
    outside = given if isinstance(inner, Mapping) else {}
    said = {k for k, v in text.items() if v is not None} | {k for k, v in outside.items() if v is not None}
    rope = text.get("rope_parameters")
    wanted = {k: v for k, v in own.items() if k not in ("architectures", "rope_parameters", "model_type")}
    taken = {k: v for k, v in wanted.items() if k not in said}
    # Two of RoPE's values may stand beside rope_parameters.
    rope = rope if isinstance(rope, Mapping) else {}
    added = {k: v for k, v in own["rope_parameters"].items() if rope.get(k) is None and k not in said}
    differ = [k for k, v in wanted.items() if text.get(k) is not None and not _alike(text[k], v)]
    beside = {k: text.get(k) if rope.get(k) is None else rope[k] for k in own["rope_parameters"]}
    differ += [k for k, v in beside.items() if v is not None and not _alike(v, own["rope_parameters"][k])]
    if taken or added:
        notes.append(f"config.json does not give {some_names([*taken, *added])}: taken from the metadata of {file}")
    if differ:
        notes.append(f"config.json and the metadata of {file} differ in {some_names(differ)}: config.json counts")
    text = {**text, **taken, "rope_parameters": {**rope, **added}}
    if isinstance(inner, Mapping):
        return {"model_type": "qwen3_5", **given, "text_config": text}
    if text.get("model_type") in (None, "qwen3_5"):  # a stub of the whole model's config, without the text model's
        text["model_type"] = own["model_type"]
    return text


def _alike(a: Any, b: Any) -> bool:
    # Floats of the metadata have 32 bits.
    return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float | int) else a == b


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
        self.file, self._fields = file, fields

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def own(self, key: str, *others: str) -> Any:
        """A key of the architecture, or one of the others that stand for it; CheckpointError if none is there."""
        for name in (key, *others):
            value = self.get(f"qwen35.{name}")
            if value is not None:
                return value
        raise CheckpointError(f"{self.file}: metadata lack qwen35.{key}")

    def heads(self, key: str, kinds: list[str]) -> int:
        """A number that may be given for each layer: that of the attention layers, the delta-rule layers having 0 or the same."""
        value = self.own(key)
        if not isinstance(value, list):
            return value
        of_attention = {n for n, kind in zip(value, kinds, strict=False) if kind == "full_attention"}
        rest = set(value) - of_attention - {0}
        if len(value) < len(kinds) or len(of_attention) != 1 or rest or 0 in of_attention:
            raise CheckpointError(f"{self.file}: qwen35.{key} is {value}, needed is one number for all attention layers")
        return of_attention.pop()

    def config(self, layers: int, heads: Heads, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The content that config.json would have."""
        for key, neutral in (("rope.scaling.type", ("none", "default")), ("rope.scaling.factor", (1.0,))):
            value = self.get(f"qwen35.{key}")
            if value is not None and value not in neutral:
                raise CheckpointError(f"{self.file}: {key} {value} is not supported")
        head_dim, rotary = self.own("attention.key_length"), self.own("rope.dimension_count")
        kinds = ["linear_attention" if f"blk.{i}.ssm_a" in shapes else "full_attention" for i in range(layers)]
        if "token_embd.weight" not in shapes:
            raise CheckpointError(f"{self.file} lacks token_embd.weight")
        sections = list(self.own("rope.dimension_sections", "mrope_sections", "rope.mrope_section"))
        if any(sections[3:]):
            raise CheckpointError(f"{self.file}: qwen35.rope.dimension_sections is {sections}, a fourth section is not supported")
        stated = self.get(NEXTN)
        interleaved = self.get("qwen35.rope.mrope_interleaved")
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": shapes["token_embd.weight"][0],
            "hidden_size": self.own("embedding_length"),
            "intermediate_size": self.own("feed_forward_length"),
            "num_hidden_layers": layers,
            "layer_types": kinds,
            "num_attention_heads": self.heads("attention.head_count", kinds),
            "num_key_value_heads": self.heads("attention.head_count_kv", kinds),
            "head_dim": head_dim,
            "linear_num_key_heads": heads.keys,
            "linear_num_value_heads": heads.values,
            "linear_key_head_dim": heads.key_dim,
            "linear_value_head_dim": heads.value_dim,
            "linear_conv_kernel_dim": self.own("ssm.conv_kernel"),
            "rms_norm_eps": float(f"{self.own('attention.layer_norm_rms_epsilon'):.6g}"),  # a float32 there
            "max_position_embeddings": self.own("context_length"),
            "tie_word_embeddings": "output.weight" not in shapes,
            **({} if stated is None else {"mtp_num_hidden_layers": stated}),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.own("rope.freq_base"),
                "partial_rotary_factor": rotary / head_dim,
                "mrope_section": sections[:3],
                **({} if interleaved is None else {"mrope_interleaved": interleaved}),
            },
        }

    def companions(self, beside: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those of tokenizer.json, generation_config.json and chat_template.jinja that are not `beside` the file, as far as the
        file has what they need; CheckpointError where there is no tokenizer at all."""
        tokens, types, merges = (self.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
        files: dict[str, bytes] = {}
        if "tokenizer.json" not in beside:
            if not (tokens and types and merges) or self.get("tokenizer.ggml.pre") != "qwen35" or len(types) != len(tokens):
                raise CheckpointError(f"{self.file}: no tokenizer of kind qwen35 inside; put tokenizer.json beside it")
            files["tokenizer.json"] = _tokenizer(tokens, types, merges)
        if tokens and "generation_config.json" not in beside:
            files["generation_config.json"] = self._generation(tokens)
        template = self.get("tokenizer.chat_template")
        # Older tokenizers have it in their config.
        if template is not None and b'"chat_template"' not in beside.get("tokenizer_config.json", b""):
            files["chat_template.jinja"] = template.encode()
        return files

    def _generation(self, tokens: list[str]) -> bytes:
        """generation_config.json: the ids that end a text, and the settings of sampling that the file recommends."""
        ends = [self.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        ends += self.get("tokenizer.ggml.eos_token_ids", [])
        ends += [tokens.index(t) for t in ("<|im_end|>", "<|endoftext|>") if t in tokens]
        generation: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(e for e in ends if e is not None))}
        for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
            value = self.get(f"general.sampling.{key}")
            if value is not None:
                generation[name] = round(value, 6)
        return json.dumps(generation).encode()


def _tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> bytes:
    """tokenizer.json."""
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    content = tokenizer_json(vocab, [], [], 0)
    content["model"]["merges"] = list(merges)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": i, "content": token, **flags, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return json.dumps(content, ensure_ascii=False).encode()
