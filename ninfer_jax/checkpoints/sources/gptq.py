"""GPTQ's int4 layout, which AutoRound writes too: `qweight` int32 `[in / 8, out]`, eight codes of 0..15 a word along `in`,
lowest first; `scales` `[in / group, out]`; `qzeros` int32 `[in / group, out / 8]`; weight = scale x (code - zero).

Symmetric means a zero of 8 everywhere. The first form of the format stores a zero less one, the second ("gptq_v2") as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import SourceTensor, mapped, nibbles, scaled

GROUPS = (32, 64, 128)
_ZERO = 8


class GPTQ(SourceTensor):
    def __init__(self, codes: TensorInfo, scales: TensorInfo, group: int):
        self._codes, self._scales, self.group = codes, scales, group
        self.shape, self.nbytes = (codes.shape[1], 8 * codes.shape[0]), codes.nbytes + scales.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        return scaled(*self.read_codes(start, stop))

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        words = np.ascontiguousarray(mapped(self._codes)[:, start:stop].T)
        scales = np.ascontiguousarray(mapped(self._scales)[:, start:stop].T, np.float32)
        return nibbles(words).view(np.int8) - np.int8(_ZERO), scales


def gptq_tensors(infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any]) -> dict[str, SourceTensor]:
    """CheckpointError, naming the tensor, for other bits, layouts and groups, for zero points and for act-order."""
    method = str(quantization.get("quant_method"))
    packing = str(quantization.get("packing_format", ""))
    bases = [n.removesuffix(".qweight") for n in infos if n.endswith(".qweight")]
    first = f"{bases[0]}.qweight" if bases else "the config"
    if quantization.get("bits") != 4:
        raise CheckpointError(f"{first}: {method} with {quantization.get('bits')} bits is not supported, 4 are")
    if "awq" in packing or quantization.get("checkpoint_format") not in (None, "gptq", "gptq_v2"):
        raise CheckpointError(f"{first}: {method} packed as {packing or quantization['checkpoint_format']} is not supported")
    found: dict[str, SourceTensor] = {}
    rest = dict(infos)
    for base in bases:
        parts = {field: rest.pop(f"{base}.{field}", None) for field in ("qweight", "qzeros", "scales", "g_idx")}
        found[f"{base}.weight"] = _tensor(base, quantization, **parts)
    return found | plain_tensors(rest)


def _tensor(
    base: str,
    quantization: Mapping[str, Any],
    qweight: TensorInfo,
    qzeros: TensorInfo | None,
    scales: TensorInfo | None,
    g_idx: TensorInfo | None,
) -> GPTQ:
    if qzeros is None or scales is None:
        raise CheckpointError(f"{base}.qweight in {qweight.file} has no {'qzeros' if qzeros is None else 'scales'} beside it")
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or qweight.dtype != "I32" or qzeros.dtype != "I32":
        raise CheckpointError(f"{base}.qweight in {qweight.file} is {qweight.dtype} {list(qweight.shape)}, not GPTQ's int32 matrix")
    inputs, (groups, outputs) = 8 * qweight.shape[0], scales.shape
    group = inputs // groups if groups else 0
    if group not in GROUPS or group * groups != inputs or qweight.shape[1] != outputs:
        raise CheckpointError(f"{base}.qweight: {inputs} inputs with {groups} scales: groups of {GROUPS} are supported")
    if scales.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"{base}.scales in {scales.file} is {scales.dtype}, needed are floats")
    if g_idx is not None:
        order = mapped(g_idx)
        if order.shape != (inputs,) or (order != np.arange(inputs) // group).any():
            raise CheckpointError(f"{base}.g_idx in {g_idx.file}: act-order (columns in another order) is not supported")
    elif quantization.get("desc_act"):
        raise CheckpointError(f"{base}.qweight in {qweight.file}: act-order (desc_act) without g_idx is not supported")
    _check_zeros(base, qzeros, quantization, (groups, outputs))
    return GPTQ(qweight, scales, group)


def _check_zeros(base: str, qzeros: TensorInfo, quantization: Mapping[str, Any], shape: tuple[int, int]) -> None:
    zeros = nibbles(np.asarray(mapped(qzeros)))
    if zeros.shape[0] != shape[0] or zeros.shape[1] < shape[1]:
        raise CheckpointError(
            f"{base}.qzeros in {qzeros.file} has shape {list(qzeros.shape)}, {shape[0]} x {shape[1]} zeros are needed"
        )
    zeros = zeros[:, : shape[1]]
    allowed = {"gptq": (_ZERO - 1,), "gptq_v2": (_ZERO,)}.get(quantization.get("checkpoint_format"))
    # Where the form is not named, a constant of 7 or 8 that the config calls symmetric can mean only one thing.
    allowed = allowed or ((_ZERO - 1, _ZERO) if quantization.get("sym") is True else (_ZERO - 1,))
    if not any((zeros == zero).all() for zero in allowed):
        raise CheckpointError(f"{base}.qzeros in {qzeros.file}: asymmetric int4 (zero points) is not supported")
