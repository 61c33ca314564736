"""Between a model whose parameters are only described and the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax.checkpoints import ParameterSpec, TensorSpec

Path = tuple[Any, ...]  # of a parameter in its model, as nnx gives it: names and indices


def parameters_of(model: nnx.Module) -> list[ParameterSpec]:
    """Every parameter of a described model, in module order."""
    found: dict[str, ParameterSpec] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        about = leaf.get_metadata()
        field, name, array = str(path[-1]), _join(path[:-1]), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if about["stored"] is None:
            spec = ParameterSpec(name, about["role"], {field: array}, _tensors(path, leaf), None)
            found[_join(path)] = spec
        elif name in found:
            found[name].arrays[field] = array
        else:
            found[name] = ParameterSpec(name, about["role"], {field: array}, _tensors(path, leaf), about["stored"])
    return list(found.values())


def parameter_specs(model: nnx.Module) -> list[TensorSpec]:
    """Name, shape, dtype and role of every checkpoint tensor that the model wants, in module order."""
    return [tensor for parameter in parameters_of(model) for tensor in parameter.tensors]


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """The static structure, to close over in a jitted function, and the parameters, to pass as an argument."""
    return nnx.split(model)


def join_and_put(parts: Sequence[np.ndarray | jax.Array]) -> jax.Array:
    """Arrays laid one after another along their first axis, on the default device."""
    # Joined on the host: the device's concatenation would be a program to compile for each shape.
    return jax.device_put(parts[0] if len(parts) == 1 else np.concatenate([np.asarray(p) for p in parts]))


def fill(
    parameters: nnx.State, arrays: MutableMapping[str, Any], put: Callable[[Sequence[Any]], jax.Array] = join_and_put
) -> nnx.State:
    """`parameters` with every description replaced by the tensors of its name or names, which are taken out of `arrays`:
    tensors that share a parameter are there twice only one parameter at a time. For models without quantised parameters.
    arrays: NumPy's or JAX's. put: makes one array of the device from the tensors of a parameter.

    Raises ValueError, naming the tensor, when one is absent or differs in shape or dtype: nothing is ever made up.
    """
    filled = []
    for path, leaf in nnx.to_flat_state(parameters):
        parts = [_take(arrays, t.name, t.shape, leaf.dtype) for t in _tensors(path, leaf)]
        filled.append((path, leaf.replace(put(parts))))
    return nnx.from_flat_state(filled)


def fill_arrays(parameters: nnx.State, arrays: MutableMapping[str, jax.Array]) -> nnx.State:
    """The same from the model's own arrays, by path ("layers.3.mlp.down_proj.words"), as an artifact holds them."""
    return nnx.from_flat_state(
        [(path, leaf.replace(_take(arrays, _join(path), leaf.shape, leaf.dtype))) for path, leaf in nnx.to_flat_state(parameters)]
    )


def checkpoint_tensors(parameters: nnx.State) -> dict[str, jax.Array]:
    """The tensors of filled parameters, or of gradients shaped like them, by their names in a checkpoint."""
    tensors = {}
    for path, leaf in nnx.to_flat_state(parameters):
        start = 0
        for tensor in _tensors(path, leaf):
            tensors[tensor.name] = leaf[start : start + tensor.shape[0]]
            start += tensor.shape[0]
    return tensors


def _take(arrays: MutableMapping[str, Any], name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    if name not in arrays:
        raise ValueError(f"parameter {name} was not loaded")
    array = arrays.pop(name)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"parameter {name} is {array.dtype}{list(array.shape)}, the model has {dtype}{list(shape)}")
    return array


def _tensors(path: Path, leaf: nnx.Param) -> tuple[TensorSpec, ...]:
    """The checkpoint tensors that lie in a parameter. Quantised ones are read as bfloat16, which checkpoints have. Draft ids
    are in no checkpoint; the rows of the draft head, by the name of that, are picked from the head's."""
    about = leaf.get_metadata()
    if about["role"] == "draft_ids":
        return ()
    stored, role = about["stored"], about["role"]
    field, dtype = (path[-1], str(leaf.dtype)) if stored is None else ("weight", "bfloat16")
    trailing = leaf.shape[1:] if stored is None else (about["columns"],)
    parts = about["parts"] or (("", leaf.shape[0]),)
    return tuple(
        TensorSpec(_join((*path[:-2], module or path[-2], field) if len(path) > 1 else path), (rows, *trailing), dtype, role)
        for module, rows in parts
    )


def _join(path: Path) -> str:
    return ".".join(map(str, path))
