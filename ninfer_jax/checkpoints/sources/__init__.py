"""Sources of weights: checkpoints in the formats that people have them in, behind one interface (`Source`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ninfer_jax.checkpoints.checkpoint import Checkpoint
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo, load_json
from ninfer_jax.checkpoints.sources.fp8 import fp8_tensors
from ninfer_jax.checkpoints.sources.gptq import gptq_tensors
from ninfer_jax.checkpoints.sources.packed import packed_tensors
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import Source, SourceTensor

__all__ = ["COMPANIONS", "Source", "SourceTensor", "open_source"]

# Copied beside the weights as they are, where they exist.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_GPTQ = ("gptq", "auto-round", "autoround", "auto_round", "intel/auto-round")
# Fields beside a quantised weight that give its format away where the config says nothing.
_TRACES = {
    ".absmax": "bitsandbytes",
    ".quant_state": "bitsandbytes",
    ".weight_global_scale": "NVFP4",
    ".weight_scale_2": "NVFP4",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 with a scale a tensor or channel",
    ".qweight": "GPTQ or AWQ",
}


def open_source(path: str | Path) -> Source:
    """A checkpoint directory, a `.safetensors` file or a `.gguf` file, headers read and formats checked.

    CheckpointError, one line: what `Checkpoint.open` refuses, and every format not known here, by its name and a tensor.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    if (folder / "manifest.json").exists():
        raise CheckpointError(f"{folder} holds a manifest.json: it is an artifact already, not a checkpoint")
    beside = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
    config = _config(folder)
    ggufs = [path] if path.suffix == ".gguf" else _ggufs(path) if path.is_dir() else []
    if ggufs:
        from ninfer_jax.checkpoints.sources.gguf_file import open_gguf  # only who has such a file waits for the package

        return open_gguf(ggufs[0], beside, config and _unquantised(config)[0])
    if config is None:
        raise CheckpointError(f"{folder / 'config.json'} does not exist; a checkpoint needs it beside its weights")
    checkpoint = Checkpoint.open(path)
    config, quantization = _unquantised(config)
    if not quantization and (folder / "quantize_config.json").is_file():
        quantization = {"quant_method": "gptq", **_json(folder / "quantize_config.json")}
    name, tensors = _tensors(checkpoint.tensors, quantization)
    files = tuple(sorted({info.file for info in checkpoint.tensors.values()}))
    return Source(path, name, config, beside, files, tensors)


def _tensors(infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any]) -> tuple[str, dict[str, SourceTensor]]:
    method = quantization.get("quant_method") or quantization.get("quant_algo")
    if method is None and not quantization:
        for suffix, kind in _TRACES.items():
            name = next((n for n in infos if n.endswith(suffix)), None)
            if name is not None:
                raise CheckpointError(f"{name} in {infos[name].file} looks like {kind}, but config.json has no quantization_config")
        return "safetensors " + "+".join(sorted({i.dtype for i in infos.values()})), plain_tensors(infos)
    if method == "fp8":
        return "block-scaled FP8", fp8_tensors(infos, quantization)
    if method in _GPTQ:
        return f"{method} int4", gptq_tensors(infos, quantization)
    if method == "compressed-tensors":
        return "compressed-tensors int4", packed_tensors(infos, quantization)
    name = next((n for suffix in _TRACES for n in infos if n.endswith(suffix)), next(iter(infos), "no tensor"))
    kind = " ".join(str(quantization[k]) for k in ("quant_method", "quant_algo", "format") if quantization.get(k))
    raise CheckpointError(f"{name}: quantisation {kind or 'without quant_method'} is not supported")


def _ggufs(folder: Path) -> list[Path]:
    """The GGUF file of a directory, or the first part of a split one; [] where there are safetensors."""
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return []
    found = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    firsts = [p for p in found if "-of-" not in p.name or "-00001-of-" in p.name]
    if len(firsts) > 1:
        raise CheckpointError(
            f"{folder} holds {len(firsts)} GGUF models ({', '.join(p.name for p in firsts[:4])}): name one of them"
        )
    return firsts


def _config(folder: Path) -> dict[str, Any] | None:
    return _json(folder / "config.json") if (folder / "config.json").is_file() else None


def _json(file: Path) -> dict[str, Any]:
    content = load_json(file.read_bytes(), str(file))
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not an object")
    return content


def _unquantised(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config without its quantisation, and that."""
    config = dict(config)
    quantization = config.pop("quantization_config", None)
    if isinstance(config.get("text_config"), dict):
        text = dict(config["text_config"])
        quantization = text.pop("quantization_config", None) or quantization
        config["text_config"] = text
    return config, quantization or {}
