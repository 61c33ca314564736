"""An artifact's parameters as plain numbers, for a CPU: by blocks of rows, because what lies between the codes and the
numbers of a whole vocabulary would take three times the memory of the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.checkpoints import ParameterSpec
from ninfer_jax.checkpoints.quantised import BLOCK_ROWS
from ninfer_jax.engine import huge_pages
from pallas_kernels import embedding
from pallas_kernels.matmul import QuantisedWeight, dequantise


def expand(spec: ParameterSpec, arrays: dict[str, np.ndarray], dtype: jnp.dtype) -> Mapping[str, np.ndarray]:
    """The tensors that a parameter stands for, by their names in a checkpoint, rounded from float32 to `dtype`; its arrays
    are taken out of `arrays`, where they go by their full names. Tensors of one parameter lie one after another."""
    own: dict[str, Any] = {field: arrays.pop(f"{spec.name}.{field}" if spec.name else field) for field in spec.arrays}
    stored, rows = spec.stored, sum(t.shape[0] for t in spec.tensors)
    if stored is None:
        (values,) = own.values()
        values = values.astype(np.float32).astype(dtype)
    else:
        size = spec.tensors[0].shape[1]
        values = huge_pages.empty((rows, size), dtype)
        if stored.kind == "matrix":
            weight = QuantisedWeight(**own, bits=stored.bits, group=stored.group, shape=(size, rows))
        else:
            table = embedding.QuantisedRows(own["codes"], own["scales"], stored.bits, stored.group)
        for start in range(0, rows, BLOCK_ROWS):
            block = _columns(weight, start).T if stored.kind == "matrix" else _rows(table, start)
            values[start : start + BLOCK_ROWS] = block
    found, start = {}, 0
    for tensor in spec.tensors:
        found[tensor.name] = values[start : start + tensor.shape[0]]
        start += tensor.shape[0]
    return found


_dequantise = jax.jit(dequantise)
_lookup = jax.jit(embedding.lookup, static_argnums=2)


def _columns(weight: QuantisedWeight, start: int) -> np.ndarray:
    """Float32 `[K, columns]`: `BLOCK_ROWS` columns of a weight from `start` on, or as many as there are."""
    padded = weight.padded_columns
    stop = min(start + BLOCK_ROWS, padded)
    # Every field has the columns along its last axis, so many numbers each.
    cut = jax.tree.map(lambda x: jnp.asarray(x[..., start * x.shape[-1] // padded : stop * x.shape[-1] // padded]), weight)
    return np.asarray(_dequantise(dataclasses.replace(cut, shape=(weight.shape[0], min(stop, weight.shape[1]) - start))))


def _rows(table: embedding.QuantisedRows, start: int) -> np.ndarray:
    part = jax.tree.map(lambda x: jnp.asarray(x[start : start + BLOCK_ROWS]), table)
    return np.asarray(_lookup(part, jnp.arange(part.codes.shape[0]), jnp.float32))
