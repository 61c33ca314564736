"""The architecture of one checkpoint, read from its `config.json` and refused where this engine would have to guess."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.files import kind_of, missing, read_json

LINEAR, FULL = "linear_attention", "full_attention"

# Keys that cannot change what the text tower computes. Everything else is either read, required to hold an
# implemented value, or refused: a key this engine has never heard of may well be a different architecture.
_IRRELEVANT = frozenset(
    [
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "language_model_only",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "image_token_id",
        "video_token_id",
        "vision_config",
        "vision_start_token_id",
        "vision_end_token_id",
        "text_config",
        "max_window_layers",
        "_name_or_path",
    ]
)
_READ = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "layer_types",
        "full_attention_interval",
        "mtp_num_hidden_layers",
        "rope_parameters",
        "partial_rotary_factor",
        "rope_theta",
    ]
)
# What the engine implements of the keys that select a variant.
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    # "swish" names the gate of the delta-rule norm (SiLU); the attention gate is a sigmoid under either value.
    "output_gate_type": ("swish", None),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
}
_ROPE_IMPLEMENTED: dict[str, tuple[Any, ...]] = {"rope_type": ("default",), "type": ("default",), "mrope_interleaved": (True,)}
_ROPE_READ = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section"})


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of a Qwen3.5-family hybrid text tower. Sizes are elements, heads or layers; no field has a default."""

    vocab_size: int  # rows of the embedding; ids that no token has are masked when sampling
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # leading dims of a head that RoPE turns, rotate-half pairs (i, i + rotary_dim / 2)
    rope_theta: float
    mrope_section: tuple[int, int, int]
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_width: int
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    mtp_layers: int  # 0 or 1

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def conv_channels(self) -> int:
        """Channels of the depthwise convolution: flat `[q | k | v]`."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"config.json: {what}")

        need(
            self.query_heads % self.kv_heads == 0,
            f"num_attention_heads {self.query_heads} is no multiple of num_key_value_heads {self.kv_heads}",
        )
        need(self.head_dim % 64 == 0, f"head_dim {self.head_dim} is no multiple of 64, the group of the KV formats")
        need(
            self.gdn_value_heads % self.gdn_key_heads == 0,
            f"linear_num_value_heads {self.gdn_value_heads} is no multiple of linear_num_key_heads {self.gdn_key_heads}",
        )
        need(
            self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim,
            f"partial_rotary_factor gives {self.rotary_dim} rotated dims of {self.head_dim}",
        )
        need(
            sum(self.mrope_section) == self.rotary_dim // 2,
            f"mrope_section {list(self.mrope_section)} does not add up to {self.rotary_dim // 2} frequencies",
        )
        need(
            set(self.layer_types) <= {LINEAR, FULL},
            f"layer_types holds {sorted(set(self.layer_types) - {LINEAR, FULL})}, known are {LINEAR} and {FULL}",
        )
        need(self.mtp_layers in (0, 1), f"mtp_num_hidden_layers is {self.mtp_layers}, implemented are 0 and 1")
        need(self.conv_width >= 2, f"linear_conv_kernel_dim is {self.conv_width}, at least 2 is needed")

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` (a path, or its parsed mapping) of model type `qwen3_5` or `qwen3_5_text`.

        Raises ValueError, on one line, for another model type, a missing key, and any key or value that would
        change the computation in a way this engine does not implement.
        """
        raw = source if isinstance(source, Mapping) else _read_json(Path(source))
        kind = raw.get("model_type")
        if kind == "qwen3_5":
            text = raw.get("text_config")
            if not isinstance(text, Mapping):
                raise ValueError("config.json: model_type qwen3_5 needs a text_config object")
            if text.get("model_type", "qwen3_5_text") != "qwen3_5_text":
                raise ValueError(f"config.json: text_config.model_type is {text['model_type']!r}, implemented is 'qwen3_5_text'")
            _refuse_unknown(raw, allow_read=("tie_word_embeddings",))
            text = {"tie_word_embeddings": raw.get("tie_word_embeddings", False), **text}
        elif kind == "qwen3_5_text":
            text = dict(raw)
        else:
            raise ValueError(f"config.json: model_type is {kind!r}, implemented are 'qwen3_5' and 'qwen3_5_text'")
        _refuse_unknown(text, allow_read=_READ)
        return cls._from_text(text)

    @classmethod
    def _from_text(cls, text: Mapping[str, Any]) -> ModelConfig:
        rope = text.get("rope_parameters")
        if not isinstance(rope, Mapping):
            raise ValueError(
                "config.json: rope_parameters is missing (an object with rope_theta, partial_rotary_factor, mrope_section)"
            )
        _refuse_rope(rope)
        theta, partial = (_number(rope if rope.get(k) is not None else text, k) for k in ("rope_theta", "partial_rotary_factor"))
        section = rope.get("mrope_section")
        if section is None:
            raise ValueError("config.json: rope_parameters.mrope_section is missing")
        if not isinstance(section, list | tuple) or len(section) != 3 or not all(_is_whole(n, 0) for n in section):
            raise ValueError(f"config.json: rope_parameters.mrope_section is {section!r}, it must be three numbers of frequencies")
        tied = text.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise ValueError(f"config.json: tie_word_embeddings is {tied!r}, it must be true or false")
        get = functools.partial(_whole, text)
        return cls(
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            intermediate_size=get("intermediate_size"),
            layer_types=_layer_types(text),
            query_heads=get("num_attention_heads"),
            kv_heads=get("num_key_value_heads"),
            head_dim=get("head_dim"),
            rotary_dim=int(get("head_dim") * partial),
            rope_theta=theta,
            mrope_section=tuple(section),
            gdn_key_heads=get("linear_num_key_heads"),
            gdn_value_heads=get("linear_num_value_heads"),
            gdn_key_dim=get("linear_key_head_dim"),
            gdn_value_dim=get("linear_value_head_dim"),
            conv_width=get("linear_conv_kernel_dim"),
            rms_norm_eps=_number(text, "rms_norm_eps"),
            max_positions=get("max_position_embeddings"),
            tied_embeddings=tied,
            mtp_layers=get("mtp_num_hidden_layers", low=0) if "mtp_num_hidden_layers" in text else 0,
        )


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    given, interval = text.get("layer_types"), text.get("full_attention_interval")
    if given is not None:
        if not isinstance(given, list | tuple) or not given or not all(isinstance(kind, str) for kind in given):
            raise ValueError(f"config.json: layer_types is {given!r}, it must be a list of {LINEAR} and {FULL}")
        if text.get("num_hidden_layers") is not None and len(given) != _whole(text, "num_hidden_layers"):
            raise ValueError(f"config.json: layer_types has {len(given)} entries, num_hidden_layers is {text['num_hidden_layers']}")
        return tuple(given)
    if text.get("num_hidden_layers") is None or interval is None:
        raise ValueError("config.json: layer_types is missing, and so is num_hidden_layers or full_attention_interval to derive it")
    count, interval = _whole(text, "num_hidden_layers"), _whole(text, "full_attention_interval")
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))


def _is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _whole(keys: Mapping[str, Any], key: str, low: int = 1) -> int:
    value = _present(keys, key)
    if not _is_whole(value, low):
        raise ValueError(f"config.json: {key} is {value!r}, it must be a whole number of at least {low}")
    return value


def _number(keys: Mapping[str, Any], key: str) -> float:
    value = _present(keys, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} is {value!r}, it must be a positive number")
    return float(value)


def _present(keys: Mapping[str, Any], key: str) -> Any:
    if keys.get(key) is None:
        raise ValueError(f"config.json: {key} is missing")
    return keys[key]


def _refuse_unknown(keys: Mapping[str, Any], allow_read: tuple[str, ...] | frozenset[str]) -> None:
    for key, value in keys.items():
        if key in _IRRELEVANT or key in allow_read:
            continue
        if key not in _IMPLEMENTED:
            raise ValueError(f"config.json: key {key!r} (value {value!r}) is not known to this engine")
        if value not in _IMPLEMENTED[key]:
            hint = "; convert the checkpoint first" if key == "quantization_config" else ""
            raise ValueError(f"config.json: {key} is {value!r}, implemented: {', '.join(map(repr, _IMPLEMENTED[key]))}{hint}")


def _refuse_rope(rope: Mapping[str, Any]) -> None:
    for key, value in rope.items():
        if key in _ROPE_READ:
            continue
        allowed = _ROPE_IMPLEMENTED.get(key)
        if allowed is None:
            raise ValueError(f"config.json: rope_parameters.{key} (value {value!r}) is not known to this engine")
        if value not in allowed:
            raise ValueError(f"config.json: rope_parameters.{key} is {value!r}, implemented: {', '.join(map(repr, allowed))}")


def _read_json(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if kind_of(path) == "a directory" else path
    if kind_of(path) is None:
        raise ValueError(f"{missing(path)}; a model directory holds config.json")
    raw = read_json(path)
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}: holds {type(raw).__name__}, not an object")
    return raw
