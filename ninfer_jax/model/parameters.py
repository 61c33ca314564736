"""Between a model whose parameters are only described and the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import jax
import jax.numpy as jnp
from flax import nnx

from weights import TensorSpec

Path = tuple[str | int, ...]


def parameter_specs(model: nnx.Module) -> list[TensorSpec]:
    """Name, shape, dtype and role of every checkpoint tensor that the model wants, in module order."""
    return [
        TensorSpec(name, (rows, *leaf.shape[1:]), str(leaf.dtype), leaf.get_metadata()["role"])
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        for name, rows in _tensors(path, leaf)
    ]


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """The static structure, to close over in a jitted function, and the parameters, to pass as an argument."""
    return nnx.split(model)


def fill(parameters: nnx.State, arrays: MutableMapping[str, jax.Array]) -> nnx.State:
    """`parameters` with every description replaced by the arrays of its name or names, which are taken out of `arrays`:
    tensors that share a parameter are there twice only one parameter at a time.

    Raises ValueError, naming the tensor, when one is absent or differs in shape or dtype: nothing is ever made up.
    """
    filled = []
    for path, leaf in nnx.to_flat_state(parameters):
        parts = [_take(arrays, name, (rows, *leaf.shape[1:]), leaf.dtype) for name, rows in _tensors(path, leaf)]
        filled.append((path, leaf.replace(parts[0] if len(parts) == 1 else jnp.concatenate(parts))))
    return nnx.from_flat_state(filled)


def checkpoint_tensors(parameters: nnx.State) -> dict[str, jax.Array]:
    """The tensors of filled parameters, or of gradients shaped like them, by their names in a checkpoint."""
    tensors = {}
    for path, leaf in nnx.to_flat_state(parameters):
        start = 0
        for name, rows in _tensors(path, leaf):
            tensors[name] = leaf[start : start + rows]
            start += rows
    return tensors


def _take(arrays: MutableMapping[str, jax.Array], name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if name not in arrays:
        raise ValueError(f"parameter {name} was not loaded")
    array = arrays.pop(name)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"parameter {name} is {array.dtype}{list(array.shape)}, the model has {dtype}{list(shape)}")
    return array


def _tensors(path: Path, leaf: nnx.Param) -> Iterator[tuple[str, int]]:
    """Names and rows of the checkpoint tensors that lie in a parameter."""
    for module, rows in leaf.get_metadata()["parts"] or ((path[-2], leaf.shape[0]),):
        yield ".".join(map(str, (*path[:-2], module, path[-1]))), rows
