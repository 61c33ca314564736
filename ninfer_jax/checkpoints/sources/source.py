"""What every source of weights offers: canonical tensors that are read in blocks of rows."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ninfer_jax.checkpoints.safetensors_file import TensorInfo

NUMPY_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": np.uint8,
}


class SourceTensor(abc.ABC):
    """A tensor under its canonical name, unread.

    shape: as the model has it, whatever the file's own layout. nbytes: that it takes in the source. group: of 4-bit codes
    that the engine's storage holds as they are, or None.
    """

    shape: tuple[int, ...]
    nbytes: int
    group: int | None = None

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 as float32, `[stop - start, ...]`."""

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The same rows as codes int8 `[rows, inputs]` in -8..7 and scales float32 `[rows, inputs / group]`."""
        raise TypeError("this tensor has no codes")


@dataclass(frozen=True)
class Source:
    """One checkpoint.

    format: in words, for the manifest. config: of config.json, without the source's own quantisation. companions:
    tokenizer and the like, as bytes by file name. files: that hold the weights. tensors: by canonical name.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    companions: Mapping[str, bytes]
    files: tuple[Path, ...]
    tensors: Mapping[str, SourceTensor]

    @property
    def has_mtp(self) -> bool:
        return any(name.startswith("mtp.") for name in self.tensors)


def mapped(info: TensorInfo) -> np.ndarray:
    """The tensor's bytes as an array mapped from its file, for one block: pages of a mapping count as used memory until
    it goes. F8_E4M3 comes as its bytes."""
    if info.nbytes == 0:
        return np.zeros(info.shape, NUMPY_DTYPES[info.dtype])
    return np.memmap(info.file, NUMPY_DTYPES[info.dtype], "r", info.offset, info.shape)


def nibbles(words: np.ndarray) -> np.ndarray:
    """int32 `[rows, n]`, eight 4-bit numbers a word, lowest first -> uint8 `[rows, 8 n]`."""
    parts = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))).astype(np.uint8) & 15
    return parts.reshape(words.shape[0], -1)


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes `[rows, inputs]` times scales `[rows, groups]`, float32."""
    rows, groups = scales.shape
    values = codes.reshape(rows, groups, -1).astype(np.float32)
    values *= scales[..., None]
    return values.reshape(codes.shape)
