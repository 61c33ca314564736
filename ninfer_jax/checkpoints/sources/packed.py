"""compressed-tensors "pack-quantized" int4: `weight_packed` int32 `[out, in / 8]`, eight codes a word along `in`, lowest
first, each 8 more than its value; `weight_scale` `[out, in / group]`; `weight_shape` int64 [out, in]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.gptq import GROUPS
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import SourceTensor, mapped, nibbles, scaled


class Packed(SourceTensor):
    def __init__(self, codes: TensorInfo, scales: TensorInfo, group: int):
        self._codes, self._scales, self.group = codes, scales, group
        self.shape, self.nbytes = (codes.shape[0], 8 * codes.shape[1]), codes.nbytes + scales.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        return scaled(*self.read_codes(start, stop))

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        words, scales = np.asarray(mapped(self._codes)[start:stop]), mapped(self._scales)[start:stop].astype(np.float32)
        return nibbles(words).view(np.int8) - np.int8(8), scales


def packed_tensors(infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any]) -> dict[str, SourceTensor]:
    """CheckpointError, naming the tensor, for every other format of compressed-tensors, zero points and act-order."""
    groups = quantization.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    first = next((n for end in (".weight_packed", ".weight_scale") for n in infos if n.endswith(end)), "the config")
    formats = {str(f) for f in (quantization.get("format"), *(g.get("format") for g in groups)) if f is not None}
    for kind in sorted(formats - {"pack-quantized"}):
        raise CheckpointError(f"{first}: compressed-tensors {kind} is not supported, pack-quantized int4 is")
    for group in groups:
        weights = group.get("weights") or {}
        kind, bits = weights.get("type", "int"), weights.get("num_bits")
        if kind != "int" or bits != 4:
            raise CheckpointError(f"{first}: compressed-tensors with {kind}{bits} weights is not supported, int4 is")
        if weights.get("symmetric") is False:
            raise CheckpointError(f"{first}: compressed-tensors asymmetric int4 (zero points) is not supported")
    found: dict[str, SourceTensor] = {}
    rest = dict(infos)
    for name in [n for n in infos if n.endswith(".weight_packed")]:
        base = name.removesuffix("_packed")
        parts = {field: rest.pop(f"{base}_{field}", None) for field in ("packed", "scale", "shape", "zero_point", "g_idx")}
        found[base] = _tensor(base, **parts)
    return found | plain_tensors(rest)


def _tensor(
    base: str,
    packed: TensorInfo,
    scale: TensorInfo | None,
    shape: TensorInfo | None,
    zero_point: TensorInfo | None,
    g_idx: TensorInfo | None,
) -> Packed:
    if zero_point is not None:
        raise CheckpointError(
            f"{base}_zero_point in {zero_point.file}: compressed-tensors asymmetric int4 (zero points) is not supported"
        )
    if g_idx is not None:
        raise CheckpointError(f"{base}_g_idx in {g_idx.file}: compressed-tensors act-order is not supported")
    if scale is None or shape is None:
        raise CheckpointError(f"{base}_packed in {packed.file} has no {base}_{'scale' if scale is None else 'shape'} beside it")
    if packed.dtype != "I32" or len(packed.shape) != 2 or shape.dtype not in ("I64", "I32") or shape.nbytes == 0:
        raise CheckpointError(f"{base}_packed in {packed.file} is {packed.dtype} {list(packed.shape)}, not int32 words of int4")
    outputs, inputs = packed.shape[0], 8 * packed.shape[1]
    if mapped(shape).tolist() != [outputs, inputs]:
        raise CheckpointError(f"{base}_shape in {shape.file} is {mapped(shape).tolist()}, {base}_packed holds {[outputs, inputs]}")
    if len(scale.shape) != 2 or scale.shape[0] != outputs or scale.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(
            f"{base}_scale in {scale.file} is {scale.dtype} {list(scale.shape)}, needed are floats [{outputs}, groups]"
        )
    group = inputs // scale.shape[1] if scale.shape[1] else 0
    if group not in GROUPS or group * scale.shape[1] != inputs:
        raise CheckpointError(f"{base}_packed: {inputs} inputs with {scale.shape[1]} scales: groups of {GROUPS} are supported")
    return Packed(packed, scale, group)
