"""Checkpoints and artifacts in: opens a Hugging Face checkpoint, checks it and fills the tensors an engine asks for.

    checkpoint = Checkpoint.open("Qwen3.8-27B")
    parameters = load_parameters(checkpoint, specs, device_put=jax.device_put)
"""

from pathlib import Path

from weights.artifact import Artifact, ArtifactError, is_artifact
from weights.checkpoint import Checkpoint, canonical_name
from weights.fill import TensorSpec, iter_parameters, load_parameters
from weights.quantised import ParameterSpec, Stored, join, quantise_tensors
from weights.safetensors_file import CheckpointError, TensorInfo
from weights.save import save_checkpoint

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

_TINY = Path(__file__).parent / "tiny"


def tiny_path() -> Path:
    """The bundled tiny model: a directory with `model.safetensors`, `config.json` and its tokenizer.

    Raises CheckpointError if the installation lacks the weights.
    """
    if not (_TINY / "model.safetensors").is_file():
        raise CheckpointError(
            f"{_TINY} lacks model.safetensors: reinstall the package, or train it with examples/train_tiny.py"
        )
    return _TINY
