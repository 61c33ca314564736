"""Block-scaled FP8: e4m3 weights and, in `NAME_scale_inv`, what each block of 128 x 128 is to be multiplied with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import SourceTensor, mapped

SUFFIX = "_scale_inv"
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class BlockFP8(SourceTensor):
    def __init__(self, weight: TensorInfo, scale: TensorInfo, block: tuple[int, int]):
        self._weight, self._scale, self._block = weight, scale, block
        self.shape, self.nbytes = weight.shape, weight.nbytes + scale.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        high, wide = self._block
        rows = mapped(self._scale)[start // high : -(-stop // high)].astype(np.float32)
        rows = rows[np.arange(start, stop) // high - start // high]
        values = _VALUES[mapped(self._weight)[start:stop]]
        for column in range(rows.shape[1]):
            values[:, column * wide : (column + 1) * wide] *= rows[:, column, None]
        return values


def fp8_tensors(infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any]) -> dict[str, SourceTensor]:
    """CheckpointError for FP8 of another kind: e5m2, or one scale a tensor or a channel."""
    weights = {n: i for n, i in infos.items() if i.dtype.startswith("F8")}
    first = next(iter(weights), None)
    given = quantization.get("weight_block_size")
    block = tuple(given) if isinstance(given, list) and len(given) == 2 and all(type(b) is int and b > 0 for b in given) else None
    if first is not None and block is None:
        raise CheckpointError(f"{first}: FP8 without weight_block_size (one scale a tensor or channel) is not supported")
    found: dict[str, SourceTensor] = {}
    rest = dict(infos)
    for name, info in weights.items():
        scale = rest.pop(name + SUFFIX, None)
        if info.dtype != "F8_E4M3" or len(info.shape) != 2:
            raise CheckpointError(
                f"{name} in {info.file}: FP8 of type {info.dtype} {list(info.shape)} is not supported, e4m3 matrices are"
            )
        if scale is None:
            raise CheckpointError(f"{name} in {info.file}: FP8 without {name + SUFFIX} is not supported")
        blocks = tuple(-(-n // b) for n, b in zip(info.shape, block, strict=True))
        if scale.shape != blocks or scale.dtype not in ("BF16", "F16", "F32"):
            raise CheckpointError(
                f"{name + SUFFIX} in {scale.file} is {scale.dtype} {list(scale.shape)}, needed are floats {list(blocks)}"
            )
        found[name] = BlockFP8(info, scale, block)
        del rest[name]
    return found | plain_tensors(rest)
