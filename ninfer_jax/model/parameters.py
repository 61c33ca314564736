"""Between a model whose parameters are only described and the arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import nnx

from weights import TensorSpec


def parameter_specs(model: nnx.Module) -> list[TensorSpec]:
    """Name, shape, dtype and role of every parameter, in module order. The name is the attribute path."""
    return [
        TensorSpec(_name(path), tuple(leaf.shape), str(leaf.dtype), leaf.get_metadata()["role"])
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    ]


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """The static structure, to close over in a jitted function, and the parameters, to pass as an argument."""
    return nnx.split(model)


def fill(parameters: nnx.State, arrays: Mapping[str, jax.Array]) -> nnx.State:
    """`parameters` with every description replaced by the array of its name.

    Raises ValueError, naming the tensor, when one is absent or differs in shape or dtype: nothing is ever made up.
    """
    filled = []
    for path, leaf in nnx.to_flat_state(parameters):
        name = _name(path)
        if name not in arrays:
            raise ValueError(f"parameter {name} was not loaded")
        array = arrays[name]
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(f"parameter {name} is {array.dtype}{list(array.shape)}, the model has {leaf.dtype}{list(leaf.shape)}")
        filled.append((path, leaf.replace(array)))
    return nnx.from_flat_state(filled)


def _name(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))
