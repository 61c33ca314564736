"""Saving: the files read back by safetensors.torch and by the loader, and no half-written checkpoint."""

import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ninfer_jax.checkpoints import Checkpoint, TensorSpec, load_parameters, save, save_checkpoint

CONFIG = {"model_type": "qwen3_5_text", "hidden_size": 4}


@pytest.fixture
def tensors():
    random = np.random.default_rng(5)
    return {
        "embed_tokens.weight": random.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
        "layers.0.linear_attn.A_log": random.standard_normal(3).astype(np.float32),
        "norm.weight": jnp.arange(4, dtype=jnp.bfloat16),
        "lm_head.weight": random.standard_normal((4, 6)).astype(np.float16).T,  # a view that is not contiguous
        "mtp.norm.weight": np.full(4, 0.5, np.float32),
        "visual.pos_embed.weight": np.ones((2, 4), np.float32),
        "scalar": np.float32(2.5),
    }


def same(got: torch.Tensor, expected) -> bool:
    expected = np.asarray(expected)
    assert str(got.dtype) == f"torch.{expected.dtype.name}" and tuple(got.shape) == expected.shape
    return np.array_equal(got.float().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
@pytest.mark.parametrize("shard_bytes", [None, 40, 1])
def test_round_trip(tmp_path, tensors, shard_bytes, prefix):
    directory = tmp_path / "new" / "tiny"
    save_checkpoint(directory, tensors, CONFIG, shard_bytes=shard_bytes, prefix=prefix)
    assert json.loads((directory / "config.json").read_text()) == CONFIG
    assert not list(directory.glob("*.partial")) + list(directory.glob(".*"))

    stored = {}
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        stored |= load_file(file)
        with safe_open(file, framework="pt") as f:
            assert f.metadata() == {"format": "pt"}
    names = {n: prefix + n for n in tensors} | {
        "lm_head.weight": "lm_head.weight",
        "mtp.norm.weight": "mtp.norm.weight",
        "visual.pos_embed.weight": "model.visual.pos_embed.weight",
    }
    assert set(stored) == set(names.values())
    assert all(same(stored[names[n]], t) for n, t in tensors.items())

    index = directory / "model.safetensors.index.json"
    if shard_bytes is None:
        assert [f.name for f in files] == ["model.safetensors"] and not index.exists()
    else:
        # 48 | 12 + 8 | 48 | 16 | 32 + 4 bytes in shards of at most 40; every tensor alone at 1.
        count = {40: 5, 1: 7}[shard_bytes]
        assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        sizes = sum(np.asarray(t).nbytes for t in tensors.values())
        assert json.loads(index.read_text())["metadata"] == {"total_size": sizes}

    wanted = {n: np.asarray(t) for n, t in tensors.items() if not n.startswith("visual.")}
    specs = [TensorSpec(n, t.shape, t.dtype.name, "test") for n, t in wanted.items()]
    loaded = load_parameters(Checkpoint.open(directory), specs)
    assert all(loaded[n].tobytes() == t.tobytes() for n, t in wanted.items())


def test_sharded_loads_as_single(tmp_path, tensors):
    save_checkpoint(tmp_path / "single", tensors, CONFIG)
    save_checkpoint(tmp_path / "sharded", tensors, CONFIG, shard_bytes=40)
    wanted = {n: np.asarray(t) for n, t in tensors.items() if not n.startswith("visual.")}
    specs = [TensorSpec(n, t.shape, "float32", "test") for n, t in wanted.items()]
    single, sharded = (load_parameters(Checkpoint.open(tmp_path / d), specs) for d in ("single", "sharded"))
    assert all(np.array_equal(single[n], sharded[n]) for n in single)


def test_saves_again_over_the_same_layout(tmp_path, tensors):
    for shard_bytes, directory in ((None, tmp_path / "single"), (40, tmp_path / "sharded")):
        save_checkpoint(directory, tensors, CONFIG, shard_bytes=shard_bytes)
        save_checkpoint(directory, tensors | {"norm.weight": np.full(4, 9, np.float32)}, CONFIG, shard_bytes=shard_bytes)
        info = Checkpoint.open(directory).tensors["norm.weight"]
        assert same(load_file(info.file)["model.norm.weight"], np.full(4, 9, np.float32))


@pytest.mark.parametrize("first, second, other", [(None, 40, "model.safetensors"), (40, None, "index.json")])
def test_other_layout_in_the_way(tmp_path, tensors, first, second, other):
    save_checkpoint(tmp_path, tensors, CONFIG, shard_bytes=first)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=f"{other} belongs to a checkpoint of the other layout"):
        save_checkpoint(tmp_path, tensors, CONFIG, shard_bytes=second)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_broken_off_save_keeps_the_old_checkpoint(tmp_path, tensors, monkeypatch):
    save_checkpoint(tmp_path, tensors, CONFIG)
    before = (tmp_path / "model.safetensors").read_bytes()

    def disk_full(shard, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(save, "save_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, {"norm.weight": np.ones(4, np.float32)}, CONFIG)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(Checkpoint.open(tmp_path).tensors) == 6


def test_save_broken_off_between_two_shards(tmp_path, tensors, monkeypatch, refused):
    save_checkpoint(tmp_path, tensors, CONFIG, shard_bytes=40)
    replace, renamed = os.replace, []

    def killed(source, target):
        if renamed:
            raise OSError("killed")
        renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(OSError, match="killed"):
        save_checkpoint(tmp_path, tensors, CONFIG, shard_bytes=40)
    # One shard is new, the others are old: not to be loaded as if they belonged together.
    refused(lambda: Checkpoint.open(tmp_path), tmp_path, "fetch the index")


def test_faulty_arguments(tmp_path, tensors):
    with pytest.raises(ValueError, match="prefix is 'language_model.', allowed are"):
        save_checkpoint(tmp_path, tensors, CONFIG, prefix="language_model.")
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        save_checkpoint(tmp_path, tensors, CONFIG, shard_bytes=0)
    with pytest.raises(ValueError, match="dtype of ids is int32, allowed are"):
        save_checkpoint(tmp_path, {"ids": np.arange(3, dtype=np.int32)}, CONFIG)
    assert not list(tmp_path.iterdir())
