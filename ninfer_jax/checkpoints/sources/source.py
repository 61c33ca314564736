"""The interface of every source of weights: canonical tensors that are read in blocks of rows."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ninfer_jax.checkpoints.safetensors_file import TensorInfo

# 8-bit floats come as their bytes.
NUMPY_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
}
GROUPS = (128, 64, 32)  # of 4-bit codes, that the engine's storage has


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


class IntegerCodes(SourceTensor):
    """A matrix of whole codes: weight = scale x (code - zero), a scale and a zero for each group of inputs of an output.

    bits: 4 or 8. groups: of an output. zeros: whether there are any but 0.
    """

    def __init__(self, shape: tuple[int, int], nbytes: int, bits: int, groups: int, zeros: bool):
        self.shape, self.nbytes, self.bits = shape, nbytes, bits
        self._inputs, self._has_zeros = shape[1] // groups, zeros
        # A large group's scale holds for the smaller ones in it.
        fitting = (g for g in GROUPS if self._inputs % g == 0)
        self.group = None if bits != 4 or zeros else next(fitting, None)

    @abc.abstractmethod
    def codes(self, start: int, stop: int) -> np.ndarray:
        """Codes of rows start..stop-1, int8 `[rows, inputs]`, symmetric around 0 or -0.5."""

    @abc.abstractmethod
    def scales(self, start: int, stop: int) -> np.ndarray:
        """Scales of the same rows, float32 `[rows, groups]`."""

    def zeros(self, start: int, stop: int) -> np.ndarray:
        """Zeros of the same rows in the numbering of `codes`, a signed type, `[rows, groups]`; asked for where there are any."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> np.ndarray:
        values = self.codes(start, stop).astype(np.float32)
        groups = values.reshape(stop - start, -1, self._inputs)
        if self._has_zeros:
            groups -= self.zeros(start, stop)[..., None].astype(np.float32)
        groups *= self.scales(start, stop)[..., None]
        return values

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if self.group is None:
            return super().read_codes(start, stop)
        scales = self.scales(start, stop)
        return self.codes(start, stop), np.repeat(scales, self._inputs // self.group, axis=1)


@dataclass(frozen=True)
class Source:
    """One checkpoint.

    format: in words, for the manifest. config: of config.json, without the source's own quantisation. companions:
    tokenizer and the like, as bytes by file name. files: that hold the weights. tensors: by canonical name. notes: on what
    of the checkpoint is left out or was not taken as it stands.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    companions: Mapping[str, bytes]
    files: tuple[Path, ...]
    tensors: Mapping[str, SourceTensor]
    notes: tuple[str, ...] = ()

    @property
    def has_mtp(self) -> bool:
        return any(name.startswith("mtp.") for name in self.tensors)


def mapped(info: TensorInfo) -> np.ndarray:
    """The tensor's bytes as an array mapped from its file, for one block: pages of a mapping count as used memory until
    it goes. Floats of 8 bits come as their bytes."""
    if info.nbytes == 0:
        return np.zeros(info.shape, NUMPY_DTYPES[info.dtype])
    return np.memmap(info.file, NUMPY_DTYPES[info.dtype], "r", info.offset, info.shape)


def reshaped(info: TensorInfo, *shape: int) -> TensorInfo:
    """The same tensor, read as of another shape with as many elements."""
    return dataclasses.replace(info, shape=shape)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 `[rows, n]`, 32 / bits numbers a word, lowest first -> uint8 `[rows, n * 32 / bits]`. bits: 4 or 8."""
    count, mask = 32 // bits, (1 << bits) - 1
    parts = words.view(np.uint32)[..., None] >> (bits * np.arange(count, dtype=np.uint32))
    return (parts.astype(np.uint8) & np.uint8(mask)).reshape(words.shape[0], -1)


def signed(words: np.ndarray, bits: int) -> np.ndarray:
    """The same numbers less half their range, int8: -8..7 or -128..127."""
    return (unpacked(words, bits) - np.uint8(1 << (bits - 1))).view(np.int8)


def lost_codes(tensors: Mapping[str, SourceTensor]) -> list[str]:
    """A note where 4-bit codes are not in a form that the engine's storage could keep."""
    codes = [t for t in tensors.values() if isinstance(t, IntegerCodes) and t.bits == 4]
    lost = sum(t.group is None for t in codes)
    why = "zero points, or groups that are no multiple of 32"
    return [f"{lost} of {len(codes)} matrices of 4-bit codes have {why}: their numbers are quantised again"] if lost else []
