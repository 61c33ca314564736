"""Filling parameters: values against torch, and checkpoints that do not fit the specs refused by name."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ninfer_jax.checkpoints import Checkpoint, TensorSpec, iter_parameters, load_parameters

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def specs_for(model, dtype="bfloat16", without=()):
    return [
        TensorSpec(name, tuple(tensor.shape), dtype, "test")
        for name, tensor in model.items()
        if not name.startswith(("visual.", *without))
    ]


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    bits = np.asarray(array).view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(bits.copy()).view(TORCH[dtype])


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("sharded", [False, True])
def test_values_equal_torch(tmp_path, model, write_single, write_sharded, sharded, prefix, dtype):
    (write_sharded if sharded else write_single)(tmp_path, model, prefix)
    specs = specs_for(model, dtype)
    loaded = load_parameters(Checkpoint.open(tmp_path), specs)
    assert list(loaded) == [spec.name for spec in specs]
    for name, array in loaded.items():
        assert array.dtype.name == dtype and array.shape == tuple(model[name].shape)
        assert torch.equal(as_torch(array, dtype), model[name].to(TORCH[dtype])), name


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("source", TORCH)
def test_rounding_and_extremes(tmp_path, write_single, source, dtype):
    # Ties to even, subnormals, signed zero and the largest values both sides can hold.
    values = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -1.0 - 2**-9, 2**-14, 3 * 2**-26, 65504.0, -65504.0, 1e-30]
    norm = torch.tensor(values, dtype=torch.float64).to(TORCH[source])
    if source != "float16":  # 65504 rounds up to 65536 in bfloat16, which float16 does not hold
        norm[8:10] = torch.tensor([65280.0, -65280.0], dtype=TORCH[source])
    write_single(tmp_path, {"norm.weight": norm})
    loaded = load_parameters(Checkpoint.open(tmp_path), specs_for({"norm.weight": norm}, dtype))
    got, expected = as_torch(loaded["norm.weight"], dtype), norm.to(TORCH[dtype])
    assert torch.equal(got, expected) and torch.equal(torch.signbit(got), torch.signbit(expected))


def test_one_shape_kind_each(tmp_path, write_single):
    model = {"a": torch.tensor(3.0), "b": torch.zeros(0, 4), "norm.weight": torch.ones(2)}
    write_single(tmp_path, model)
    loaded = load_parameters(Checkpoint.open(tmp_path), specs_for(model, "float32"))
    assert loaded["a"].shape == () and loaded["a"] == 3.0 and loaded["b"].shape == (0, 4)


def test_loaded_arrays_outlive_the_file(tmp_path, model, write_single):
    file = write_single(tmp_path, model)
    loaded = load_parameters(Checkpoint.open(tmp_path), specs_for(model))
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(as_torch(loaded["norm.weight"], "bfloat16"), model["norm.weight"])


def test_progress_and_device_put(tmp_path, model, write_sharded):
    write_sharded(tmp_path, model)
    specs = specs_for(model)
    calls = []
    loaded = load_parameters(Checkpoint.open(tmp_path), specs, progress=lambda *call: calls.append(call), device_put=jax.device_put)
    assert all(isinstance(a, jax.Array) and a.dtype == jnp.bfloat16 for a in loaded.values())
    sizes = {spec.name: model[spec.name].nbytes for spec in specs}
    assert sorted(name for *_, name in calls) == sorted(sizes)
    done = 0
    for got, total, name in calls:
        done += sizes[name]
        assert (got, total) == (done, sum(sizes.values()))


def test_holds_one_tensor_at_a_time(tmp_path, write_sharded):
    size = 2**21  # bytes of one tensor as stored, the unit of the peaks below
    model = {f"layers.{i}.w": torch.zeros(size // 2, dtype=torch.bfloat16) for i in range(12)}
    checkpoint = Checkpoint.open(write_sharded(tmp_path, model))

    def peak(dtype, **kwargs) -> float:
        tracemalloc.start()
        load_parameters(checkpoint, specs_for(model, dtype), **kwargs)
        result = tracemalloc.get_traced_memory()[1] / size
        tracemalloc.stop()
        return result

    slack = 0.8  # the scan for NaN takes up to 1.5 MiB
    assert peak("bfloat16") < 12 + slack
    assert peak("float32") < 24 + 1 + slack  # the result, twice as wide, and one tensor as stored
    assert peak("bfloat16", device_put=lambda array: None) < 1 + slack
    assert peak("float32", device_put=lambda array: None) < 1 + 2 + slack


# ---- tensors that do not fit


def test_missing_tensors(tmp_path, model, write_sharded, refused):
    specs = specs_for(model) + [TensorSpec(f"layers.{i}.missing", (2,), "bfloat16", "test") for i in range(1, 10)]
    checkpoint = Checkpoint.open(write_sharded(tmp_path, model))
    names = ["layers.1.missing", "layers.4.missing"]
    message = refused(lambda: load_parameters(checkpoint, specs), tmp_path, "lacks 9 of 17", *names, "and 5 more")
    assert "layers.5.missing" not in message and "tie_word_embeddings" not in message
    refused(lambda: iter_parameters(checkpoint, specs), "lacks 9")  # before the first tensor


def test_missing_head(tmp_path, model, write_single, refused):
    specs = specs_for(model)
    del model["lm_head.weight"]
    write_single(tmp_path, model)
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "lm_head.weight", "tie_word_embeddings to true")


def test_missing_mtp(tmp_path, model, write_single, refused):
    specs = specs_for(model)
    del model["mtp.fc.weight"]
    write_single(tmp_path, model)
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "mtp.fc.weight", "speculation")


def test_unknown_tensor(tmp_path, model, write_single, refused):
    specs = specs_for(model)
    model["layers.0.mlp.up_proj.bias"] = torch.ones(12)
    file = write_single(tmp_path, model)
    checkpoint = Checkpoint.open(tmp_path)
    refused(lambda: load_parameters(checkpoint, specs), "layers.0.mlp.up_proj.bias", file, "does not have")
    loaded = load_parameters(checkpoint, specs, ignore_prefixes=["layers.0.mlp.up_proj.b"])
    assert "layers.0.mlp.up_proj.bias" not in loaded


def test_mtp_left_unread_only_when_told(tmp_path, model, write_single, refused):
    model["mtp.fc.weight"] = model["mtp.fc.weight"].to(torch.float8_e4m3fn)  # nobody needs it: its dtype does not matter
    write_single(tmp_path, model)
    checkpoint = Checkpoint.open(tmp_path)
    specs = specs_for(model, without=["mtp."])
    assert not any(n.startswith("mtp.") for n in load_parameters(checkpoint, specs, ignore_prefixes=("mtp.",)))
    refused(lambda: load_parameters(checkpoint, specs), "mtp.fc.weight", "F8_E4M3")
    model["mtp.fc.weight"] = torch.zeros(8, 16)
    write_single(tmp_path, model)
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "mtp.fc.weight", "ignore mtp.")


def test_ignored_prefix_does_not_hide_a_wanted_tensor(tmp_path, model, write_single, refused):
    write_single(tmp_path, model)
    specs = specs_for(model)
    loaded = load_parameters(Checkpoint.open(tmp_path), specs, ignore_prefixes=("mtp.",))
    assert "mtp.fc.weight" in loaded
    model["mtp.fc.weight"] = model["mtp.fc.weight"].to(torch.float8_e4m3fn)
    write_single(tmp_path, model)
    checkpoint = Checkpoint.open(tmp_path)
    refused(lambda: load_parameters(checkpoint, specs, ignore_prefixes=("mtp.",)), "mtp.fc.weight", "F8_E4M3")


def test_wrong_shape(tmp_path, model, write_sharded, refused):
    specs = specs_for(model)
    model["embed_tokens.weight"] = model["embed_tokens.weight"].T.contiguous()
    model["norm.weight"] = torch.ones(9)
    write_sharded(tmp_path, model)
    refused(
        lambda: load_parameters(Checkpoint.open(tmp_path), specs),
        "embed_tokens.weight",
        tmp_path / "model-00001-of-00002.safetensors",
        "has shape [8, 16]",
        "asks for [16, 8]",
        "1 more",
    )


@pytest.mark.parametrize("dtype, code", [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32"), (torch.float64, "F64")])
def test_quantised_tensor(tmp_path, model, write_single, refused, dtype, code):
    specs = specs_for(model)
    model["mtp.fc.weight"] = torch.zeros(8, 16).to(dtype)
    file = write_single(tmp_path, model)
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "mtp.fc.weight", file, code, "convert it first")


def test_packed_tensor_under_another_name(tmp_path, model, write_single, refused):
    # GPTQ and AWQ replace `weight` by `qweight`; "convert it first" says more than "missing".
    specs = specs_for(model)
    model["layers.0.mlp.up_proj.qweight"] = torch.zeros(12, 1, dtype=torch.int32)
    del model["layers.0.mlp.up_proj.weight"]
    file = write_single(tmp_path, model)
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "up_proj.qweight", file, "I32", "convert it first")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", TORCH.values())
def test_non_finite(tmp_path, model, write_sharded, refused, dtype, value):
    model["layers.0.mlp.up_proj.weight"] = torch.ones(12, 8, dtype=dtype)
    model["layers.0.mlp.up_proj.weight"][11, 7] = value
    write_sharded(tmp_path, model)
    refused(
        lambda: load_parameters(Checkpoint.open(tmp_path), specs_for(model)),
        "layers.0.mlp.up_proj.weight",
        tmp_path / "model-00002-of-00002.safetensors",
        f"holds {value} at [11, 7]",
    )


def test_non_finite_after_the_first_step_of_the_scan(tmp_path, write_single, refused):
    norm = torch.ones(2**20 + 5, dtype=torch.bfloat16)
    norm[-2] = float("nan")
    write_single(tmp_path, {"norm.weight": norm})
    specs = specs_for({"norm.weight": norm})
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "norm.weight", "[1048579]")


@pytest.mark.parametrize(
    "source, target, value", [("float32", "float16", 1e5), ("bfloat16", "float16", -1e5), ("float32", "bfloat16", 3.4e38)]
)
def test_out_of_range(tmp_path, write_single, refused, source, target, value):
    norm = torch.tensor([1.0, value]).to(TORCH[source])
    file = write_single(tmp_path, {"norm.weight": norm})
    specs = specs_for({"norm.weight": norm}, target)
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "norm.weight", file, "[1]", f"to {target}")


# ---- tied embeddings


def test_tied_without_head(tmp_path, model, write_single):
    del model["lm_head.weight"]
    write_single(tmp_path, model)
    assert "lm_head.weight" not in load_parameters(Checkpoint.open(tmp_path), specs_for(model))


def test_tied_with_equal_head(tmp_path, model, write_sharded):
    model["lm_head.weight"] = model["embed_tokens.weight"].clone()
    write_sharded(tmp_path, model)
    loaded = load_parameters(Checkpoint.open(tmp_path), specs_for(model, without=["lm_head."]))
    assert "lm_head.weight" not in loaded


@pytest.mark.parametrize("change", ["value", "dtype", "shape"])
def test_tied_with_another_head(tmp_path, model, write_sharded, refused, change):
    head = model["embed_tokens.weight"].clone()
    if change == "value":
        head[-1, -1] += 1
    elif change == "dtype":
        head = head.float()
    else:
        head = head.reshape(8, 16)
    model["lm_head.weight"] = head
    write_sharded(tmp_path, model)
    specs = specs_for(model, without=["lm_head."])
    files = [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    refused(lambda: load_parameters(Checkpoint.open(tmp_path), specs), "lm_head.weight", "embed_tokens.weight", *files)


# ---- specs


def test_faulty_specs(tmp_path, model, write_single):
    with pytest.raises(ValueError, match="dtype of norm.weight is 'int8', allowed are bfloat16, float16, float32"):
        TensorSpec("norm.weight", (8,), "int8", "norm")
    write_single(tmp_path, model)
    specs = specs_for(model)
    with pytest.raises(ValueError, match="norm.weight twice"):
        load_parameters(Checkpoint.open(tmp_path), [*specs, TensorSpec("norm.weight", (8,), "float32", "norm")])
