"""Writes a checkpoint in the Hugging Face layout: one `model.safetensors`, or shards with an index, and `config.json`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ninfer_jax.checkpoints.checkpoint import INDEX_NAME, PREFIXES, SINGLE_NAME
from ninfer_jax.checkpoints.fill import TARGET_DTYPES


def save_checkpoint(
    path: str | Path,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    shard_bytes: int | None = None,
    prefix: str = "model.",
) -> None:
    """Writes `tensors` (canonical name → numpy or JAX array, bfloat16, float16 or float32) and `config` into `path`.

    `prefix` is "model." as the text-only class saves it, "model.language_model." as the vision-language class does, or "";
    `lm_head.*` and `mtp.*` carry none, `visual.*` becomes `model.visual.*`. With `shard_bytes` a new shard begins when the
    next tensor would take the current one over that many bytes; a tensor larger than that has a shard for itself.

    Every file is written under a temporary name and then renamed, the index last, so that a broken-off save never looks
    like a whole checkpoint. Raises ValueError for another dtype, prefix or size, and where `path` already holds a
    checkpoint of the other layout (single or sharded), which would leave it ambiguous.
    """
    if prefix not in (*PREFIXES, ""):
        raise ValueError(f"prefix is {prefix!r}, allowed are {', '.join(map(repr, (*PREFIXES, '')))}")
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}, must be at least 1")
    arrays = {}
    for name, tensor in tensors.items():
        array = np.asarray(tensor, order="C")  # the file stores rows; a transposed view must be copied
        if array.dtype.name not in TARGET_DTYPES:
            raise ValueError(f"dtype of {name} is {array.dtype.name}, allowed are {', '.join(TARGET_DTYPES)}")
        arrays[_stored_name(name, prefix)] = array

    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    shards = _split(arrays, shard_bytes)
    sharded = len(shards) > 1
    other = directory / (SINGLE_NAME if sharded else INDEX_NAME)
    if other.exists():
        raise ValueError(f"{other} belongs to a checkpoint of the other layout: remove it or save elsewhere")

    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if not sharded:
        names = [SINGLE_NAME]
    for name, shard in zip(names, shards, strict=True):
        # Some readers, transformers among them, ask for this key.
        save_file(shard, _temporary(directory / name), metadata={"format": "pt"})
    # From here until the new index lies there, an older checkpoint of the same names counts as incomplete.
    (directory / INDEX_NAME).unlink(missing_ok=True)
    for name in names:
        os.replace(_temporary(directory / name), directory / name)
    _write_json(directory / "config.json", dict(config))
    if sharded:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(array.nbytes for array in arrays.values())
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _stored_name(name: str, prefix: str) -> str:
    if name.startswith(("lm_head.", "mtp.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else prefix + name


def _split(arrays: dict[str, np.ndarray], shard_bytes: int | None) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in arrays.items():
        if shard_bytes is not None and shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    return shards


def _temporary(path: Path) -> Path:
    # Not ending in .safetensors: what a broken-off save leaves must not count as a shard.
    return path.with_name(f".{path.name}.partial")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _temporary(path).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(_temporary(path), path)
