"""Sources of weights: checkpoints in the formats that people have them in, behind one interface (`Source`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ninfer_jax.checkpoints.checkpoint import Checkpoint, canonical_name
from ninfer_jax.checkpoints.mtp import PREFIX, unlisted_mtp
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo, load_json, read_header
from ninfer_jax.checkpoints.sources.compressed import compressed_tensors
from ninfer_jax.checkpoints.sources.fp8 import fp8_tensors
from ninfer_jax.checkpoints.sources.gptq import gptq_tensors
from ninfer_jax.checkpoints.sources.mlx import refuse_mlx
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import IntegerCodes, Source, SourceTensor
from ninfer_jax.files import head_of
from ninfer_jax.model_path import COMPANIONS

__all__ = ["COMPANIONS", "Source", "SourceTensor", "open_source"]

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
# Words of a setting that changes what is computed from the weights, or what their numbers stand for. All others say how the
# codes were found, or are read where the format is.
_CHANGES = frozenset(
    (
        "adapter",
        "adapters",
        "codebook",
        "codebooks",
        "eora",
        "hadamard",
        "lora",
        "outlier",
        "outliers",
        "quip",
        "residual",
        "rotation",
        "rotations",
        "sparsity",
        "svd",
        "transform",
        "transforms",
    )
)
_GGUF = b"GGUF"


def open_source(path: str | Path, mtp: str | Path | None = None) -> Source:
    """A checkpoint directory, a `.safetensors` file or a GGUF file of any name, headers read and formats checked.

    mtp: a safetensors file with the MTP layer of a checkpoint that has none of its own. CheckpointError, one line: what
    `Checkpoint.open` refuses, and every format not known here, by its name and a tensor.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    if (folder / "manifest.json").exists():
        raise CheckpointError(f"{folder} holds a manifest.json: it is an artifact already, not a checkpoint")
    beside = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
    config = _config(folder)
    ggufs = _ggufs(path) if path.is_dir() else [path] if _is_gguf(path) else []
    if ggufs:
        from ninfer_jax.checkpoints.sources.gguf_file import open_gguf  # only who has such a file waits for the package

        found = open_gguf(ggufs[0], beside, config and _unquantised(config)[0])
    else:
        found = _open_safetensors(path, folder, config, beside)
    if mtp is not None:
        return _with_mtp(found, Path(mtp))
    if not found.has_mtp and (file := unlisted_mtp(path, found.files)):
        note = f"{file.name} holds an MTP layer that is no part of the checkpoint: to take it, convert with --mtp {file}"
        return dataclasses.replace(found, notes=(*found.notes, note))
    return found


def _open_safetensors(path: Path, folder: Path, config: dict[str, Any] | None, beside: dict[str, bytes]) -> Source:
    if config is None:
        raise CheckpointError(f"{folder / 'config.json'} does not exist; a checkpoint needs it beside its weights")
    checkpoint = Checkpoint.open(path)
    refuse_mlx(checkpoint.tensors, config)
    config, quantization = _unquantised(config)
    if not quantization and (folder / "quantize_config.json").is_file():
        quantization = {"quant_method": "gptq", **_json(folder / "quantize_config.json")}
    notes: list[str] = []
    name, tensors = _tensors(checkpoint.tensors, quantization, notes)
    files = tuple(sorted({info.file for info in checkpoint.tensors.values()}))
    return Source(path, name, config, beside, files, tensors, tuple(notes))


def _with_mtp(source: Source, file: Path) -> Source:
    """The source with the MTP layer in `file`; CheckpointError for any other tensor there, and where it has one already."""
    if source.has_mtp:
        raise CheckpointError(f"--mtp {file}: {source.path} has an MTP layer of its own")
    if not file.is_file():
        raise CheckpointError(f"--mtp {file}: No such file or directory")
    infos = {canonical_name(name): info for name, info in read_header(file).items()}
    other = next((name for name in infos if not name.startswith(PREFIX)), None)
    if other is not None or not infos:
        raise CheckpointError(
            f"--mtp {file} holds {other or 'no tensor'}: needed are the {PREFIX}* tensors of an MTP layer, and no others"
        )
    note = f"the MTP layer is that of {file.name}"
    return dataclasses.replace(
        source, files=(*source.files, file), tensors={**source.tensors, **plain_tensors(infos)}, notes=(*source.notes, note)
    )


def _tensors(
    infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any], notes: list[str]
) -> tuple[str, dict[str, SourceTensor]]:
    """The format in words and the tensors, unread. notes: taken further."""
    _check_settings(quantization)
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
        tensors = gptq_tensors(infos, quantization, notes)
        bits = sorted({t.bits for t in tensors.values() if isinstance(t, IntegerCodes)})
        return f"{method} {'+'.join(f'int{b}' for b in bits)}", tensors
    if method == "compressed-tensors":
        return compressed_tensors(infos, quantization, notes)
    name = next((n for suffix in _TRACES for n in infos if n.endswith(suffix)), next(iter(infos), "no tensor"))
    kind = " ".join(str(quantization[k]) for k in ("quant_method", "quant_algo", "format") if quantization.get(k))
    raise CheckpointError(f"{name}: quantisation {kind or 'without quant_method'} is not supported")


def _check_settings(quantization: Mapping[str, Any]) -> None:
    """CheckpointError for a setting that the weights alone do not make good: a rotation, an adapter, a sparse layout."""
    for key, value in quantization.items():
        words = _CHANGES.intersection(re.split(r"[^a-z0-9]+", key.lower()))
        dense = isinstance(value, Mapping) and value.get("format") == "dense"
        if words and value not in (None, False, {}, [], "", "none") and not dense:
            raise CheckpointError(f"quantization_config: {key} ({str(value)[:80]}) changes what is computed, and is not supported")


def _is_gguf(path: Path) -> bool:
    """Whether a file says that it is GGUF, whatever its name: Ollama's have none but a digest."""
    return path.suffix == ".gguf" or (path.is_file() and head_of(path).startswith(_GGUF))


def _ggufs(folder: Path) -> list[Path]:
    """The GGUF file of a directory, or the first part of a split one; [] where there are safetensors."""
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return []
    found = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    found = found or sorted(p for p in folder.iterdir() if not p.suffix and _is_gguf(p))
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
