"""Opening a checkpoint: what is found, and every kind of faulty file refused by name before tensor data are read."""

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ninfer_jax import model_path
from ninfer_jax.checkpoints import Checkpoint, CheckpointError, canonical_name, tiny_path

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
EMBED = "model.language_model.embed_tokens.weight"  # in FIRST, as the first tensor of the fixture
A_LOG = "model.language_model.layers.0.linear_attn.A_log"  # in SECOND


def edit_index(directory: Path, change) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "stored, canonical",
    [
        ("model.language_model.layers.3.self_attn.q_proj.weight", "layers.3.self_attn.q_proj.weight"),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", "layers.0.linear_attn.in_proj_qkv.weight"),
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"),
        ("embed_tokens.weight", "embed_tokens.weight"),
    ],
)
def test_canonical_names(stored, canonical):
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
@pytest.mark.parametrize("sharded", [False, True])
def test_lists_every_tensor(tmp_path, model, write_single, write_sharded, sharded, prefix):
    (write_sharded if sharded else write_single)(tmp_path, model, prefix)
    checkpoint = Checkpoint.open(tmp_path)
    codes = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    found = {**checkpoint.tensors, **checkpoint.vision_tensors}
    assert {n: (t.shape, t.dtype, t.nbytes) for n, t in found.items()} == {
        n: (tuple(t.shape), codes[t.dtype], t.nbytes) for n, t in model.items()
    }
    assert list(checkpoint.vision_tensors) == ["visual.pos_embed.weight"]
    assert "visual.pos_embed.weight" not in checkpoint.tensors
    info = checkpoint.tensors["norm.weight"]
    assert info.original_name == prefix + "norm.weight"
    assert info.file == tmp_path / (FIRST if sharded else "model.safetensors")
    raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    assert raw == model["norm.weight"].view(torch.uint8).numpy().tobytes()


def test_has_mtp(tmp_path, model, write_single):
    write_single(tmp_path, model)
    assert Checkpoint.open(tmp_path).has_mtp
    write_single(tmp_path, {n: t for n, t in model.items() if not n.startswith("mtp.")})
    assert not Checkpoint.open(tmp_path).has_mtp


def test_single_file_of_any_name(tmp_path, model, write_single):
    file = write_single(tmp_path, model).rename(tmp_path / "tiny.safetensors")
    assert Checkpoint.open(tmp_path).tensors == Checkpoint.open(file).tensors


def test_nothing_to_open(tmp_path, model, write_single, write_sharded, refused):
    refused(lambda: Checkpoint.open(tmp_path / "absent"), tmp_path / "absent", "does not exist")
    refused(lambda: Checkpoint.open(tmp_path), tmp_path, "holds no .safetensors file", INDEX)
    (tmp_path / "notes.txt").write_text("x")
    refused(lambda: Checkpoint.open(tmp_path / "notes.txt"), tmp_path / "notes.txt", "neither")
    write_sharded(tmp_path, model)
    write_single(tmp_path, model)
    refused(lambda: Checkpoint.open(tmp_path), tmp_path, "model.safetensors", INDEX, "remove one")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    refused(lambda: Checkpoint.open(tmp_path), tmp_path, FIRST, SECOND, "fetch the index")


def test_reads_no_tensor_data(tmp_path):
    # A sparse file of 1 GiB: reading it whole would show in the peak.
    header = b'{"a":{"dtype":"U8","shape":[1073741824],"data_offsets":[0,1073741824]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with file.open("r+b") as f:
        f.truncate(8 + len(header) + 2**30)
    tracemalloc.start()
    assert Checkpoint.open(tmp_path).tensors["a"].nbytes == 2**30
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


# ---- one file, broken


def test_shard_cut_by_one_byte(tmp_path, model, write_sharded, refused):
    file = write_sharded(tmp_path, model) / SECOND
    size = file.stat().st_size
    # safetensors writes wide dtypes first, so that a tensor of the narrowest dtype ends the file.
    last = max(Checkpoint.open(tmp_path).tensors.values(), key=lambda t: t.offset if t.file == file else -1)
    file.write_bytes(file.read_bytes()[:-1])
    refused(lambda: Checkpoint.open(tmp_path), file, last.original_name, "cut short", size, size - 1)


def test_shard_cut_in_the_data(tmp_path, model, write_sharded, refused):
    model["embed_tokens.weight"] = torch.zeros(1000, 8, dtype=torch.bfloat16)  # half of the file lies in this tensor
    file = write_sharded(tmp_path, model) / FIRST
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(lambda: Checkpoint.open(tmp_path), file, EMBED, "cut short")


@pytest.mark.parametrize("kept", [0, 7, 8, 40])
def test_shard_cut_in_the_header(tmp_path, model, write_sharded, refused, kept):
    file = write_sharded(tmp_path, model) / FIRST
    file.write_bytes(file.read_bytes()[:kept])
    refused(lambda: Checkpoint.open(tmp_path), file, "too short" if kept < 8 else "cut short", "fetch it again")


def test_shard_with_bytes_appended(tmp_path, model, write_sharded, refused):
    file = write_sharded(tmp_path, model) / SECOND
    with file.open("ab") as f:
        f.write(bytes(16))
    refused(lambda: Checkpoint.open(tmp_path), file, "16 bytes after its last tensor")


def test_not_a_safetensors_file(tmp_path, refused):
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3989000000\n")
    refused(lambda: Checkpoint.open(tmp_path), file, "git-lfs")
    file.write_bytes(b"\xff" * 100)
    refused(lambda: Checkpoint.open(tmp_path), file, "not a safetensors file")


@pytest.mark.parametrize(
    "header, parts",
    [
        (b"not json", ["not JSON"]),
        (b"\xff\xfe\xfd", ["not JSON"]),
        (b"[" * 100_000, ["not JSON"]),
        (b"[1, 2]", ["list"]),
        (b'{"a": 3}', ["describes a as 3"]),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', ["describes a"]),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', ["describes a"]),
        (b'{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}', ["describes a"]),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', ["gives a 8 bytes", "takes 12"]),
        (b'{"a": {"dtype": "F5", "shape": [2], "data_offsets": [0, 8]}}', ["F5"]),
        (
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b' "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            ["lists a twice"],
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            ["data of b", "overlaps a"],
        ),
        (
            b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]},'
            b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            ["data of b", "hole after a"],
        ),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', ["data of a", "hole after the header"]),
        (b'{"a\\nb": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', ["a\\nb"]),
    ],
)
def test_faulty_header(tmp_path, refused, header, parts):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refused(lambda: Checkpoint.open(tmp_path), file, *parts)


def test_no_damaged_header_byte_escapes_as_another_error(tmp_path, model, write_single, refused):
    file = write_single(tmp_path, {n: model[n] for n in ("norm.weight", "mtp.norm.weight")})
    clean = file.read_bytes()
    (length,) = struct.unpack("<Q", clean[:8])
    random = np.random.default_rng(3)
    opened = 0
    for position in range(8 + length):
        damaged = bytearray(clean)
        damaged[position] ^= 1 << random.integers(8)
        file.write_bytes(damaged)
        try:
            Checkpoint.open(tmp_path)
            opened += 1  # a letter of a name, or of the metadata: another valid header
        except CheckpointError as error:
            assert str(file) in str(error) and len(str(error).splitlines()) == 1
    assert 0 < opened < length


# ---- index and shards that disagree


def test_shard_missing(tmp_path, model, write_sharded, refused):
    (write_sharded(tmp_path, model) / SECOND).unlink()
    refused(lambda: Checkpoint.open(tmp_path), tmp_path / INDEX, SECOND, A_LOG, "fetch it")


def test_index_lists_a_tensor_its_shard_lacks(tmp_path, model, write_sharded, refused):
    write_sharded(tmp_path, model)
    edit_index(tmp_path, lambda i: i["weight_map"].update({"model.language_model.layers.9.x": SECOND}))
    refused(lambda: Checkpoint.open(tmp_path), "model.language_model.layers.9.x", tmp_path / SECOND, INDEX)


def test_shard_holds_a_tensor_the_index_does_not_list(tmp_path, model, write_sharded, refused):
    write_sharded(tmp_path, model)
    edit_index(tmp_path, lambda i: i["weight_map"].pop(A_LOG))
    refused(lambda: Checkpoint.open(tmp_path), A_LOG, tmp_path / SECOND, "does not list")


def test_index_names_the_wrong_shard(tmp_path, model, write_sharded, refused):
    write_sharded(tmp_path, model)
    edit_index(tmp_path, lambda i: i["weight_map"].update({A_LOG: FIRST}))
    refused(lambda: Checkpoint.open(tmp_path), A_LOG, FIRST, tmp_path / SECOND)


def test_tensor_in_two_shards(tmp_path, model, write_sharded, refused):
    write_sharded(tmp_path, model)
    save_file({EMBED: model["embed_tokens.weight"], A_LOG: model["layers.0.linear_attn.A_log"]}, tmp_path / SECOND)
    refused(lambda: Checkpoint.open(tmp_path), EMBED, "twice", tmp_path / FIRST, tmp_path / SECOND)


def test_both_prefixes_for_one_tensor(tmp_path, refused):
    names = ("model.norm.weight", "model.language_model.norm.weight")
    save_file({name: torch.ones(8) for name in names}, tmp_path / "model.safetensors")
    refused(lambda: Checkpoint.open(tmp_path), *names, tmp_path / "model.safetensors", "are both norm.weight")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("{", ["not JSON"]),
        ("[]", ["no weight_map"]),
        ('{"weight_map": {}}', ["no weight_map"]),
        ('{"weight_map": {"a": 1}}', ["puts a into 1"]),
        ('{"weight_map": {"a": "../a.safetensors"}}', ["puts a into '../a.safetensors'"]),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', ["lists a twice"]),
    ],
)
def test_faulty_index(tmp_path, refused, text, parts):
    (tmp_path / INDEX).write_text(text)
    refused(lambda: Checkpoint.open(tmp_path), tmp_path / INDEX, *parts)


def test_tiny_path(tmp_path, monkeypatch):
    monkeypatch.setattr(model_path, "_PACKAGE", tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/tiny lacks model\.safetensors"):
        tiny_path()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"")
    assert tiny_path() == tmp_path / "tiny"
