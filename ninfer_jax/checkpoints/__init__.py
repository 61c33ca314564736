"""Checkpoints and artifacts in: opens a Hugging Face checkpoint, checks it and fills the tensors an engine asks for.

checkpoint = Checkpoint.open("Qwen3.8-27B")
parameters = load_parameters(checkpoint, specs, device_put=jax.device_put)

The names are imported when they are first used, so that headers can be read without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninfer_jax.checkpoints.artifact import Artifact, ArtifactError, is_artifact
    from ninfer_jax.checkpoints.checkpoint import Checkpoint, canonical_name
    from ninfer_jax.checkpoints.fill import TensorSpec, iter_parameters, load_parameters
    from ninfer_jax.checkpoints.quantised import ParameterSpec, Stored, join, quantise_tensors
    from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
    from ninfer_jax.checkpoints.save import save_checkpoint
    from ninfer_jax.model_path import tiny_path

__all__ = [
    "Artifact",
    "ArtifactError",
    "Checkpoint",
    "CheckpointError",
    "ParameterSpec",
    "Stored",
    "TensorInfo",
    "TensorSpec",
    "canonical_name",
    "is_artifact",
    "iter_parameters",
    "join",
    "load_parameters",
    "quantise_tensors",
    "save_checkpoint",
    "tiny_path",
]

_HOMES = {
    "ninfer_jax.checkpoints.artifact": ("Artifact", "ArtifactError", "is_artifact"),
    "ninfer_jax.checkpoints.checkpoint": ("Checkpoint", "canonical_name"),
    "ninfer_jax.checkpoints.fill": ("TensorSpec", "iter_parameters", "load_parameters"),
    "ninfer_jax.checkpoints.quantised": ("ParameterSpec", "Stored", "join", "quantise_tensors"),
    "ninfer_jax.checkpoints.safetensors_file": ("CheckpointError", "TensorInfo"),
    "ninfer_jax.checkpoints.save": ("save_checkpoint",),
    "ninfer_jax.model_path": ("tiny_path",),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
