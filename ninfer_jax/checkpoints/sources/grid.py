"""Matrices of one byte a weight, e4m3 or int8, with a scale for each block of rows and columns."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ninfer_jax.checkpoints.safetensors_file import TensorInfo
from ninfer_jax.checkpoints.sources.source import SourceTensor, mapped

_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
# ue8m0: an exponent with a bias of 127 and nothing else; 255 stands for NaN.
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)
EXPONENTS = ("F8_E8M0", "U8")  # dtypes of scales that are ue8m0
FLOATS = ("BF16", "F16", "F32")


class Grid(SourceTensor):
    """weight = scale x (code - zero). block: rows and columns that share a scale. scale, zeros: for each block, `blocks_of`."""

    def __init__(self, weight: TensorInfo, scale: TensorInfo, block: tuple[int, int], zeros: TensorInfo | None = None):
        self._weight, self._scale, self._zeros, self._block = weight, scale, zeros, block
        self.shape, self.nbytes = weight.shape, weight.nbytes + scale.nbytes
        self.words = "float8" if weight.dtype == "F8_E4M3" else "int8"

    def read(self, start: int, stop: int) -> np.ndarray:
        stored = mapped(self._weight)[start:stop]
        values = _E4M3[stored] if self._weight.dtype == "F8_E4M3" else stored.astype(np.float32)
        scales = self._spread(self._scale, start, stop)
        zeros = None if self._zeros is None else self._spread(self._zeros, start, stop)
        wide = self._block[1]
        for column in range(scales.shape[1]):
            part = values[:, column * wide : (column + 1) * wide]
            if zeros is not None:
                part -= zeros[:, column, None]
            part *= scales[:, column, None]
        return values

    def _spread(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """A row of numbers for each of rows start..stop-1, float32."""
        high = self._block[0]
        stored = mapped(info)[start // high : -(-stop // high)]
        rows = _E8M0[stored] if info.dtype in EXPONENTS else stored.astype(np.float32)
        return rows[np.arange(start, stop) // high - start // high]


def blocks_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of a matrix along both axes, the last of a row or a column perhaps cut."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
