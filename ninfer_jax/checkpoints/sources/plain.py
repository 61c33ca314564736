"""Unquantised safetensors: BF16, F16 and F32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ninfer_jax.checkpoints.fill import SOURCE_DTYPES
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.source import SourceTensor, mapped


class Plain(SourceTensor):
    def __init__(self, info: TensorInfo):
        self._info, self.shape, self.nbytes = info, info.shape, info.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        return mapped(self._info)[start:stop].astype(np.float32)


def plain_tensors(infos: Mapping[str, TensorInfo]) -> dict[str, SourceTensor]:
    """The tensors that no quantised format claims. CheckpointError where one is of a type that has no plain values."""
    for name, info in infos.items():
        if info.dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"{name} in {info.file} is {info.dtype} and belongs to no format known here: {', '.join(SOURCE_DTYPES)}, "
                "block-scaled FP8, GPTQ and AutoRound in 4 or 8 bits, compressed-tensors, GGUF"
            )
    return {name: Plain(info) for name, info in infos.items()}
