"""Checkpoint tensors into the engine's quantised storage, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.checkpoints.fill import TensorSpec
from pallas_kernels import embedding
from pallas_kernels.matmul import quantise
from pallas_kernels.matmul.quantised import COLUMNS

BLOCK_ROWS = 8 * COLUMNS  # of a tensor, quantised at a time: 21 MB in float32 at 5,120 inputs


@dataclass(frozen=True)
class Stored:
    """Storage of a parameter: kind `matrix` (multiplied: the arrays of a `QuantisedWeight`) or `rows` (looked up:
    codes and scales of `QuantisedRows`); bits and group of its codes."""

    kind: str
    bits: int
    group: int

    @property
    def fields(self) -> tuple[str, ...]:
        return ("words", "scales", "unit") if self.kind == "matrix" else ("codes", "scales")

    @property
    def axis(self) -> int:
        """Along which the arrays of blocks of outputs are joined."""
        return -1 if self.kind == "matrix" else 0


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: the arrays that the engine has for it, and the checkpoint tensors that it is made of.

    name: "layers.3.self_attn.qkv_proj". arrays: field -> shape and dtype: `weight` (or the parameter's own name) where it
    is kept as it is, else the fields of `stored`. tensors: laid one after another along their first axis.
    """

    name: str
    role: str
    arrays: dict[str, jax.ShapeDtypeStruct]
    tensors: tuple[TensorSpec, ...]
    stored: Stored | None


class Rows(Protocol):
    """A tensor that is read in rows: an array, or something that reads them when it is sliced."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        raise NotImplementedError


def quantise_tensors(stored: Stored, tensors: Sequence[Rows]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The stored arrays of `tensors` (each `[rows, inputs]`, one after another along rows), a block of rows at a time.

    Yields (rows done, arrays of the block by field). The blocks of a `matrix` are joined along the last axis of every
    field, those of `rows` along the first: `join`. Every block has `BLOCK_ROWS` rows but the last.
    """
    total = sum(t.shape[0] for t in tensors)
    for start in range(0, total, BLOCK_ROWS):
        block = _rows(tensors, start, min(start + BLOCK_ROWS, total))
        if stored.kind == "matrix":
            made = quantise(jnp.asarray(block).T, bits=stored.bits, group=stored.group)
        else:
            made = embedding.quantise_rows(jnp.asarray(block), bits=stored.bits, group=stored.group)
        yield start + block.shape[0], {field: np.asarray(getattr(made, field)) for field in stored.fields}


def join(stored: Stored, blocks: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The whole arrays by field from the blocks of `quantise_tensors`, in order."""
    return {field: np.concatenate([block[field] for block in blocks], axis=stored.axis) for field in stored.fields}


def _rows(tensors: Sequence[Rows], start: int, stop: int) -> np.ndarray:
    """Rows start..stop-1 of the tensors laid one after another."""
    found, at = [], 0
    for tensor in tensors:
        low, high = max(start - at, 0), min(stop - at, tensor.shape[0])
        if low < high:
            found.append(tensor[low:high])
        at += tensor.shape[0]
    return found[0] if len(found) == 1 else np.concatenate(found)
