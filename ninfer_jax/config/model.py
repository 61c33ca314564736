"""The architecture of one checkpoint, read from its `config.json` and refused where this engine would have to guess."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.config.keys import sort_keys
from ninfer_jax.files import FileError, kind_of, missing, read_json

LINEAR, FULL = "linear_attention", "full_attention"

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
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "pretraining_tp": (1,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "quantization_config": (None, {}),
}
_ROPE_IMPLEMENTED: dict[str, tuple[Any, ...]] = {"rope_type": ("default",), "type": ("default",), "mrope_interleaved": (True,)}
_ROPE_READ = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section"})
# Of these, a config with a text_config may have the only copy outside it.
_OUTSIDE = ("tie_word_embeddings", "mtp_num_hidden_layers")
_log = logging.getLogger(__name__)


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
    def from_hf(cls, source: str | Path | Mapping[str, Any], tensors: Collection[str] | None = None) -> ModelConfig:
        """The model that a Hugging Face `config.json` (a path, or its parsed mapping) of type `qwen3_5` or `qwen3_5_text`
        describes.

        tensors: canonical names of the checkpoint's tensors, by default those of the safetensors beside a path. Where the
        config does not say how many MTP layers there are, they do. Raises ValueError, on one line, for another model type, a
        missing key, and any key or value that would change the computation in a way this engine does not implement; keys
        that are passed over (`ninfer_jax.config.keys`) are logged.
        """
        raw = source if isinstance(source, Mapping) else read_config(source)
        text, notes = _text_of(raw)
        for note in notes:
            _log.info(note)
        if text.get("mtp_num_hidden_layers") is None:
            if tensors is None:
                tensors = () if isinstance(source, Mapping) else _names_beside(Path(source))
            text["mtp_num_hidden_layers"] = _mtp_layers(tensors)
        return cls._from_text(text)

    @classmethod
    def _from_text(cls, text: Mapping[str, Any]) -> ModelConfig:
        rope = text.get("rope_parameters")
        if not isinstance(rope, Mapping):
            raise ValueError(
                "config.json: rope_parameters is missing (an object with rope_theta, partial_rotary_factor, mrope_section)"
            )
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
            mtp_layers=get("mtp_num_hidden_layers", low=0),
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


def config_notes(raw: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json left unread because they only say where the file comes from; ValueError as `from_hf`."""
    return _text_of(raw)[1]


def _text_of(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The text model's keys, all of them known, and notes on those that are left unread."""
    _refuse_mlx(raw)
    kind = raw.get("model_type")
    notes: list[str] = []
    if kind == "qwen3_5":
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError("config.json: model_type qwen3_5 needs a text_config object")
        if text.get("model_type", "qwen3_5_text") != "qwen3_5_text":
            raise ValueError(f"config.json: text_config.model_type is {text['model_type']!r}, implemented is 'qwen3_5_text'")
        notes += sort_keys(raw, read=_READ, variants=_IMPLEMENTED)
        text = dict(text)
        for key in (k for k in raw if k in _READ):
            if text.get(key) is None and key in _OUTSIDE:
                text[key] = raw[key]
            elif text.get(key) != raw[key] and key != "tie_word_embeddings":
                raise ValueError(f"config.json: {key} is {text.get(key)!r} in text_config and {raw[key]!r} outside it: which?")
    elif kind == "qwen3_5_text":
        text = dict(raw)
    else:
        raise ValueError(f"config.json: model_type is {kind!r}, implemented are 'qwen3_5' and 'qwen3_5_text'")
    where = "text_config." if kind == "qwen3_5" else ""
    notes += sort_keys(text, read=_READ, variants=_IMPLEMENTED, path=where)
    rope = text.get("rope_parameters")
    if isinstance(rope, Mapping):
        notes += sort_keys(rope, read=_ROPE_READ, variants=_ROPE_IMPLEMENTED, path="rope_parameters.", irrelevant=lambda key: False)
    return text, notes


def _refuse_mlx(raw: Mapping[str, Any]) -> None:
    found = raw.get("quantization")
    if isinstance(found, Mapping) and "bits" in found and "group_size" in found:
        from ninfer_jax.checkpoints.sources.mlx import mlx_sentence  # whose package starts JAX

        raise ValueError(f"config.json: {mlx_sentence(found)}")


def _mtp_layers(tensors: Collection[str]) -> int:
    """Number of MTP layers of a checkpoint of these tensors, 0 or 1, where its config does not say."""
    if not any(name.startswith("mtp.") for name in tensors):
        return 0
    from ninfer_jax.checkpoints.mtp import unlike_one_layer

    wrong = unlike_one_layer(tensors)
    if wrong:
        raise ValueError(f"config.json: mtp_num_hidden_layers is missing, and the checkpoint's mtp.* tensors {wrong}")
    return 1


def _names_beside(path: Path) -> Collection[str]:
    """The canonical names of the safetensors in a model's directory; none where it holds no such file."""
    from ninfer_jax.checkpoints import Checkpoint
    from ninfer_jax.checkpoints.checkpoint import INDEX_NAME

    folder = path if path.is_dir() else path.parent
    if not (folder / INDEX_NAME).exists() and next(folder.glob("*.safetensors"), None) is None:
        return ()
    return Checkpoint.open(folder).tensors


def read_config(path: str | Path) -> Mapping[str, Any]:
    """The object in a config.json, named itself or by its directory; FileError for anything else."""
    path = Path(path)
    path = path / "config.json" if kind_of(path) == "a directory" else path
    if kind_of(path) is None:
        raise FileError(f"{missing(path)}; a model directory holds config.json")
    raw = read_json(path)
    if not isinstance(raw, Mapping):
        raise FileError(f"{path}: holds {type(raw).__name__}, not an object")
    return raw
