"""Checkpoints and artifacts in: opens a Hugging Face checkpoint, checks it and fills the tensors an engine asks for.

checkpoint = Checkpoint.open("Qwen3.8-27B")
parameters = load_parameters(checkpoint, specs, device_put=jax.device_put)
"""

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
