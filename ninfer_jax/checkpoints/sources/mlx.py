"""Checkpoints of MLX, by what gives them away. Their layout is not read.

mlx-lm and mlx-vlm name all tensors from `language_model.` on, store norms as 1 + w and convolutions with the taps in the
middle, and quantise into `weight` uint32 with `scales` and `biases` (weight = scale x code + bias) beside it; config.json has
`quantization` with `group_size` and `bits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo

_PREFIX = "language_model.model."


def mlx_sentence(quantization: Mapping[str, Any] | None, tensor: str = "") -> str:
    """The sentence about such a checkpoint: its kind, what shows it, and what to take instead."""
    form = "unquantised"
    if quantization is not None:
        mode = quantization.get("mode", "affine")
        form = f"{quantization.get('bits')} bits in groups of {quantization.get('group_size')}, {mode}"
    shown = f" ({tensor})" if tensor else ""
    return (
        f"this is an MLX checkpoint, {form}{shown}, whose layout is not read: take the safetensors that it was made from, or a "
        "GPTQ, compressed-tensors or GGUF version of the model"
    )


def refuse_mlx(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """CheckpointError for a checkpoint of MLX. infos: by canonical name."""
    found = config.get("quantization")
    found = found if isinstance(found, Mapping) and "bits" in found and "group_size" in found else None
    packed = next((n for n in infos if n.endswith(".biases") and f"{n.removesuffix('biases')}scales" in infos), None)
    named = next((n for n in infos if n.startswith(_PREFIX)), None)
    name = packed or named
    if found is None and name is None:
        return
    if found is None and packed is not None:
        found = {"bits": "?", "group_size": "?"}
    file = next(iter(infos.values())).file if name is None else infos[name].file
    raise CheckpointError(f"{file}: {mlx_sentence(found, name or '')}")
