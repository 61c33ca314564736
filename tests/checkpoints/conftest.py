"""Small checkpoints written by torch and safetensors.torch, which share no code with the loader."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ninfer_jax.checkpoints import CheckpointError

VL = "model.language_model."
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def stored(name: str, prefix: str) -> str:
    if name.startswith(("lm_head.", "mtp.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else prefix + name


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    """Canonical name → tensor; all three dtypes, a head, an MTP part, one tensor of the vision tower."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    return {
        "embed_tokens.weight": normal(16, 8),
        "layers.0.linear_attn.A_log": normal(4, dtype=torch.float32),
        "layers.0.linear_attn.conv1d.weight": normal(8, 1, 4),
        "layers.0.mlp.up_proj.weight": normal(12, 8, dtype=torch.float16),
        "norm.weight": normal(8),
        "lm_head.weight": normal(16, 8),
        "mtp.fc.weight": normal(8, 16),
        "mtp.norm.weight": normal(8),
        "visual.pos_embed.weight": normal(5, 3),
    }


@pytest.fixture
def write_single():
    def write(directory: Path, model: dict[str, torch.Tensor], prefix: str = VL) -> Path:
        directory.mkdir(exist_ok=True)
        file = directory / "model.safetensors"
        save_file({stored(n, prefix): t for n, t in model.items()}, file, metadata={"format": "pt"})
        return file

    return write


@pytest.fixture
def write_sharded():
    def write(directory: Path, model: dict[str, torch.Tensor], prefix: str = VL) -> Path:
        """Tensors go to the two shards by turns."""
        directory.mkdir(exist_ok=True)
        tensors = {stored(n, prefix): t for n, t in model.items()}
        weight_map = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
        for shard in SHARDS:
            save_file({n: tensors[n] for n in tensors if weight_map[n] == shard}, directory / shard)
        # The published 27B index gives total_size as a float.
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1.0}, "weight_map": weight_map}))
        return directory

    return write


@pytest.fixture
def rewrite_header():
    def rewrite(file: Path, change) -> None:
        """Replaces the header of a file by `change(header as bytes)`, data unchanged."""
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = change(raw[8 : 8 + length])
        file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])

    return rewrite


@pytest.fixture
def refused():
    def check(action, *parts: object) -> str:
        """Runs `action`, which must raise CheckpointError with one line that holds all of `parts`."""
        with pytest.raises(CheckpointError) as caught:
            action()
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        for part in parts:
            assert str(part) in message, message
        return message

    return check
