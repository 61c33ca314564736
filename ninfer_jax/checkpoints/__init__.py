"""Checkpoints and artifacts in: opens a Hugging Face checkpoint, checks it and fills the tensors an engine asks for.

checkpoint = Checkpoint.open("Qwen3.8-27B")
parameters = load_parameters(checkpoint, specs, device_put=jax.device_put)
"""

from pathlib import Path

from ninfer_jax.checkpoints.artifact import Artifact, ArtifactError, is_artifact
from ninfer_jax.checkpoints.checkpoint import Checkpoint, canonical_name
from ninfer_jax.checkpoints.fill import TensorSpec, iter_parameters, load_parameters
from ninfer_jax.checkpoints.quantised import ParameterSpec, Stored, join, quantise_tensors
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.save import save_checkpoint

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

# In a wheel the bundled model lies inside the package; in a checkout, and so in an editable install, in the folder that makes it.
_PACKAGE = Path(__file__).resolve().parent.parent
_TINY = next((p for p in (_PACKAGE / "tiny", _PACKAGE.parent / "weights" / "tiny") if p.is_dir()), _PACKAGE / "tiny")


def tiny_path() -> Path:
    """The bundled tiny model: a directory with `model.safetensors`, `config.json` and its tokenizer.

    Raises CheckpointError if the installation lacks the weights.
    """
    if not (_TINY / "model.safetensors").is_file():
        raise CheckpointError(
            f"{_TINY} lacks model.safetensors: reinstall the package, or train it with weights/training/train_tiny.py"
        )
    return _TINY
