"""Codes of 4 and 8 bits, groups, zero points and exponents as GPTQ, compressed-tensors and FP8 checkpoints have them, against
numbers in float64 that were packed bit by bit; and MLX, which is told by its looks."""

from __future__ import annotations

import json

import formats
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from formats import as_gptq, as_packed, assert_same, coded, read_in_blocks
from safetensors.torch import save_file

from ninfer_jax.checkpoints.sources import open_source
from ninfer_jax.config import ModelConfig
from ninfer_jax.engine.convert import plan
from ninfer_jax.engine.weights_in import open_weights
from pallas_kernels.matmul import dequantise
from pallas_kernels.matmul.quantised import pack

DOWN, GATE, QKV, Q = (
    "layers.0.mlp.down_proj",
    "layers.0.mlp.gate_proj",
    "layers.0.linear_attn.in_proj_qkv",
    "layers.1.self_attn.q_proj",
)


@pytest.fixture(scope="module")
def some(tensors):
    """A few matrices and one vector, bfloat16."""
    names = [f"{base}.weight" for base in (DOWN, GATE, QKV, Q)] + ["norm.weight"]
    return formats.as_bfloat16({n: tensors[n] for n in names})


def write(folder, some, replaced, quantization):
    """replaced: by module, the tensors that stand for its weight."""
    stored = {n: t for n, t in some.items() if n.removesuffix(".weight") not in replaced}
    for parts in replaced.values():
        stored |= parts
    return formats.write(folder, stored, quantization)


def meaning(some, **codes):
    return {n: t.float().numpy() for n, t in some.items()} | {f"{base}.weight": c.meaning for base, c in codes.items()}


def assert_codes_are_kept(tensor, matrix, group):
    """Codes less half the range, and the scale of every `group` inputs, in a block that begins amid words."""
    assert tensor.group == group
    codes, scales = tensor.read_codes(3, 60)
    np.testing.assert_array_equal(codes, matrix.codes[3:60] - 8)
    np.testing.assert_array_equal(
        (codes.reshape(57, -1, group) * scales[..., None]).reshape(57, -1).astype(np.float32), matrix.meaning[3:60]
    )


# --- GPTQ ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "kept"), [(-1, 64), (192, 64), (96, 32), (32, 32), (24, None)])
def test_gptq_groups_of_any_size(tmp_path, tensors, some, group, kept):
    """192 inputs: one scale a channel (-1), and groups that hold several of the storage's, or none."""
    matrix = coded(tensors[f"{DOWN}.weight"], 4, group)
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    source = open_source(write(tmp_path / "source", some, {DOWN: as_gptq(DOWN, matrix, 1)}, config))
    assert_same(source, meaning(some, **{DOWN: matrix}))
    found = source.tensors[f"{DOWN}.weight"]
    if kept is None:
        assert found.group is None and "1 of 1 matrices" in source.notes[0]
    else:
        assert_codes_are_kept(found, matrix, kept)
        assert not source.notes


@pytest.mark.parametrize(("lacks", "form"), [(1, "gptq"), (0, "gptq_v2")])
def test_modules_of_8_bits_under_dynamic(tmp_path, tensors, some, lacks, form):
    eight, four = coded(tensors[f"{DOWN}.weight"], 8, 32), coded(tensors[f"{GATE}.weight"], 4, 64)
    uneven = coded(tensors[f"{Q}.weight"], 8, 128, asymmetric=True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "checkpoint_format": form}
    dynamic = {
        r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
        r".*q_proj": {"bits": 8, "group_size": 128, "sym": False},
        r"-:.*in_proj_qkv": {},
    }
    replaced = {base: as_gptq(base, m, lacks) for base, m in ((DOWN, eight), (GATE, four), (Q, uneven))}
    source = open_source(write(tmp_path / "source", some, replaced, config | {"dynamic": dynamic}))
    assert source.format == "gptq int4+int8"
    assert_same(source, meaning(some, **{DOWN: eight, GATE: four, Q: uneven}))
    assert [source.tensors[f"{base}.weight"].group for base in (DOWN, GATE, Q)] == [None, 64, None]


def test_a_module_of_8_bits_in_autoround(tmp_path, tensors, some):
    eight, four = coded(tensors[f"{DOWN}.weight"], 8, 64), coded(tensors[f"{GATE}.weight"], 4, 64, asymmetric=True)
    extra = {f"model.language_model.{DOWN}": {"bits": 8}, f"model.language_model.{GATE}": {"sym": False}}
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "packing_format": "auto_round:auto_gptq"}
    replaced = {DOWN: as_gptq(DOWN, eight, 1), GATE: as_gptq(GATE, four, 1)}
    source = open_source(write(tmp_path / "source", some, replaced, config | {"extra_config": extra}))
    assert_same(source, meaning(some, **{DOWN: eight, GATE: four}))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("lacks", "form"), [(1, "gptq"), (0, "gptq_v2")])
def test_gptq_zero_points(tmp_path, tensors, some, bits, lacks, form):
    matrix = coded(tensors[f"{DOWN}.weight"], bits, 64, asymmetric=True)
    assert matrix.zeros.min() > 0 and len(set(matrix.zeros.reshape(-1).tolist())) > 3
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": False, "checkpoint_format": form}
    source = open_source(write(tmp_path / "source", some, {DOWN: as_gptq(DOWN, matrix, lacks)}, config))
    assert_same(source, meaning(some, **{DOWN: matrix}))
    assert source.tensors[f"{DOWN}.weight"].group is None and len(source.notes) == (bits == 4)


@pytest.mark.parametrize(
    ("bits", "lacks", "config", "said"),
    [
        (4, 1, {"sym": True, "checkpoint_format": "gptq"}, ("asymmetric int4", "says sym")),
        (8, 1, {"sym": True, "dynamic": {"+:.*down_proj": {"bits": 8}}}, ("asymmetric int8", "says sym")),
        (4, 1, {"sym": False}, ("asymmetric int4", "checkpoint_format: gptq or gptq_v2")),
        (4, 1, {"sym": False, "checkpoint_format": "marlin"}, ("packed as marlin",)),
        (2, 1, {"sym": True}, ("codes of 2 bits", "4 and 8 are")),
        (4, 16, {"sym": False, "checkpoint_format": "gptq"}, ("stored zero of 15", "0 to others")),
        (4, 1, {"bits": 3}, ("with 3 bits", "4 and 8 are")),
        (4, 1, {"sym": False, "checkpoint_format": "gptq", "adapter": {"rank": 64}}, ("adapter", "changes what is computed")),
        (4, 1, {"sym": False, "checkpoint_format": "gptq", "rotation": "hadamard"}, ("rotation", "changes what is computed")),
    ],
)
def test_gptq_refusals(tmp_path, tensors, some, refused, bits, lacks, config, said):
    matrix = coded(tensors[f"{DOWN}.weight"], bits, 64, asymmetric=bits != 2)
    parts = as_gptq(DOWN, matrix, 1)
    if lacks == 16:
        parts[f"{DOWN}.qzeros"] |= 15
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, **config}
    refused(lambda: open_source(write(tmp_path / "source", some, {DOWN: parts}, config)), *said)


def test_settings_of_how_the_codes_were_found_do_not_matter(tmp_path, tensors, some):
    matrix = coded(tensors[f"{DOWN}.weight"], 4, 64)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "damp_percent": 0.05, "model_seqlen": 4096}
    config |= {"meta": {"quantizer": ["gptqmodel:5.0"]}, "adapter": None, "rotation": None, "true_sequential": True}
    source = open_source(write(tmp_path / "source", some, {DOWN: as_gptq(DOWN, matrix, 1)}, config))
    assert_same(source, meaning(some, **{DOWN: matrix}))


def test_codes_of_channels_go_into_the_artifact_as_they_are(tmp_path, tensors, recipe):
    """A scale that a whole row shares is the largest of each of its groups: it takes the full 127 steps, and nothing is lost."""
    codes = {n: coded(tensors[n], 4, -1) for n in formats.matrices(tensors)}
    replaced = {n.removesuffix(".weight"): as_gptq(n.removesuffix(".weight"), c, 1) for n, c in codes.items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}
    source = open_source(write(tmp_path / "source", formats.as_bfloat16(tensors), replaced, config))
    planned = plan(source, recipe)
    assert planned.made[DOWN] == planned.made["layers.1.self_attn.qkv_proj"] == "repacked" and not planned.notes
    groups = {spec.name: spec.stored.group for spec in planned.parameters if spec.stored}
    assert (groups[DOWN], groups["layers.1.self_attn.qkv_proj"]) == (64, 128)  # of 192 and 256 inputs
    own, scales = source.tensors[f"{DOWN}.weight"].read_codes(0, 256)
    stored = dequantise(pack(jnp.asarray(own).T, jnp.asarray(scales).T, bits=4))
    np.testing.assert_allclose(np.asarray(stored).T, codes[f"{DOWN}.weight"].meaning, rtol=3e-7)


# --- compressed-tensors ----------------------------------------------------------------------------------------------------


def weights(**about):
    return {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, **about}}


def compressed(*groups, format="pack-quantized", **more):
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": dict(enumerate(groups)), **more}


@pytest.mark.parametrize(("group", "kept"), [(-1, 64), (96, 32), (24, None)])
def test_compressed_groups_of_any_size(tmp_path, tensors, some, group, kept):
    matrix = coded(tensors[f"{DOWN}.weight"], 4, group)
    about = weights(group_size=None, strategy="channel") if group == -1 else weights(group_size=group)
    source = open_source(write(tmp_path / "source", some, {DOWN: as_packed(DOWN, matrix)}, compressed(about)))
    assert_same(source, meaning(some, **{DOWN: matrix}))
    if kept is not None:
        assert_codes_are_kept(source.tensors[f"{DOWN}.weight"], matrix, kept)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, -1])
def test_compressed_zero_points(tmp_path, tensors, some, bits, group):
    """W4A16 and W8A16, asymmetric; blocks of rows begin amid words."""
    down, qkv = (coded(tensors[f"{base}.weight"], bits, group, asymmetric=True) for base in (DOWN, QKV))
    about = weights(num_bits=bits, symmetric=False, group_size=group)
    replaced = {DOWN: as_packed(DOWN, down, "packed"), QKV: as_packed(QKV, qkv, "int8")}
    source = open_source(write(tmp_path / "source", some, replaced, compressed(about)))
    assert source.format == f"compressed-tensors int{bits}"
    assert_same(source, meaning(some, **{DOWN: down, QKV: qkv}))
    assert len(source.notes) == (bits == 4)


def by_row(weight, dtype):
    """A value of 8 bits a weight and a float32 scale a row; with zeros for int8."""
    scale = (np.abs(weight).max(1, keepdims=True) / (448 if dtype == torch.float8_e4m3fn else 100)).astype(np.float32)
    if dtype == torch.float8_e4m3fn:
        codes = torch.from_numpy(weight / scale).to(dtype)
        return codes, scale, (codes.to(torch.float64).numpy() * scale).astype(np.float32)
    codes = np.rint(weight / scale).astype(np.int8)
    return torch.from_numpy(codes), scale, (codes.astype(np.float64) * scale).astype(np.float32)


def test_mixed_precision_with_whole_numbers_and_fp8(tmp_path, tensors, some):
    """int4 in groups, int8 packed, int8 and e4m3 by channel, and scales of activations and of the KV cache, in one checkpoint."""
    four, eight = coded(tensors[f"{GATE}.weight"], 4, 64), coded(tensors[f"{DOWN}.weight"], 8, -1)
    fp8, fp8_scale, fp8_meaning = by_row(tensors[f"{Q}.weight"], torch.float8_e4m3fn)
    int8, int8_scale, int8_meaning = by_row(tensors[f"{QKV}.weight"], torch.int8)
    replaced = {
        GATE: as_packed(GATE, four),
        DOWN: as_packed(DOWN, eight),
        Q: {f"{Q}.weight": fp8, f"{Q}.weight_scale": torch.from_numpy(fp8_scale), f"{Q}.input_scale": torch.ones(1)},
        QKV: {f"{QKV}.weight": int8, f"{QKV}.weight_scale": torch.from_numpy(int8_scale)},
        "kv": {"layers.1.self_attn.k_scale": torch.ones(1)},
    }
    groups = [
        {"format": "pack-quantized", "targets": ["re:.*gate_proj$"], **weights()},
        {"format": "pack-quantized", "targets": ["re:.*down_proj$"], **weights(num_bits=8, strategy="channel")},
        {"format": "int-quantized", "targets": ["re:.*in_proj_qkv$"], **weights(num_bits=8, strategy="channel")},
        {"format": "float-quantized", "targets": ["Linear"], **weights(num_bits=8, type="float", strategy="channel")}
        | {"input_activations": {"num_bits": 8, "dynamic": True}},
    ]
    more = {"kv_cache_scheme": {"num_bits": 8}, "transform_config": {}, "sparsity_config": {"format": "dense"}, "version": "0.17.2"}
    source = open_source(write(tmp_path / "source", some, replaced, compressed(*groups, format="mixed-precision", **more)))
    assert source.format == "compressed-tensors float8+int4+int8"
    expected = meaning(some, **{GATE: four, DOWN: eight}) | {f"{Q}.weight": fp8_meaning, f"{QKV}.weight": int8_meaning}
    assert_same(source, expected)
    assert_codes_are_kept(source.tensors[f"{GATE}.weight"], four, 64)
    assert len(source.notes) == 2 and "activations to be quantised" in source.notes[0] and "2 scales" in source.notes[1]


@pytest.mark.parametrize(
    ("shape", "about"),
    [
        ((), {}),
        ((1,), {}),
        ((256,), {}),
        ((256, 6), {"group_size": 32}),
        ((2, 2), {"strategy": "block", "block_structure": [128, 128]}),
    ],
)
def test_scales_of_fp8_for_the_tensor_its_rows_groups_and_blocks(tmp_path, tensors, some, shape, about):
    rng = np.random.default_rng(1)
    scale = rng.uniform(0.5, 2, shape).astype(np.float32)
    codes = torch.from_numpy(tensors[f"{DOWN}.weight"] * 100).to(torch.float8_e4m3fn)
    high, wide = (128, 128) if shape == (2, 2) else (256 if scale.size == 1 else 1, 32 if shape == (256, 6) else 192)
    whole = np.repeat(np.repeat(scale.reshape(-(-256 // high), -1), high, 0), wide, 1)[:, :192]
    parts = {f"{DOWN}.weight": codes, f"{DOWN}.weight_scale": torch.from_numpy(np.asarray(scale))}
    config = compressed(weights(num_bits=8, type="float", **about), format="float-quantized")
    source = open_source(write(tmp_path / "source", some, {DOWN: parts}, config))
    expected = (codes.to(torch.float64).numpy() * whole).astype(np.float32)
    assert_same(source, meaning(some) | {f"{DOWN}.weight": expected})


def test_mxfp8(tmp_path, tensors, some):
    """Exponents of 8 bits for groups of 32: 2 ** (byte - 127)."""
    codes = torch.from_numpy(tensors[f"{DOWN}.weight"] * 50).to(torch.float8_e4m3fn)
    exponents = np.random.default_rng(2).integers(110, 130, (256, 6), dtype=np.uint8)
    parts = {f"{DOWN}.weight": codes, f"{DOWN}.weight_scale": torch.from_numpy(exponents)}
    about = weights(num_bits=8, type="float", group_size=32, scale_dtype="torch.uint8")
    source = open_source(write(tmp_path / "source", some, {DOWN: parts}, compressed(about, format="mxfp8-quantized")))
    scales = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)
    assert_same(source, meaning(some) | {f"{DOWN}.weight": (codes.to(torch.float64).numpy() * scales).astype(np.float32)})


@pytest.mark.parametrize(
    ("about", "more", "said"),
    [
        ({"symmetric": False}, {}, ("weight_packed", "no layers.0.mlp.down_proj.weight_zero_point", "asymmetric")),
        ({"num_bits": 8}, {}, ("weight_packed", "codes of 4 bits", "config_groups say 8")),
        ({"num_bits": 3}, {}, ("int3", "int4, int8")),
        ({"type": "float"}, {"format": "mixed-precision"}, ("float4",)),
        (
            {},
            {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            ("transform_config", "changes what is computed"),
        ),
        ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparsity_config", "changes what is computed")),
        ({}, {"format": "marlin-24"}, ("marlin-24", "pack-quantized")),
    ],
)
def test_compressed_refusals(tmp_path, tensors, some, refused, about, more, said):
    parts = as_packed(DOWN, coded(tensors[f"{DOWN}.weight"], 4, 64))
    refused(lambda: open_source(write(tmp_path / "source", some, {DOWN: parts}, compressed(weights(**about), **more))), *said)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("weight_zero_point", torch.zeros(4, dtype=torch.int32), ("weight_zero_point", "[32, 3]")),
        ("weight_g_idx", torch.zeros(192, dtype=torch.int32), ("weight_g_idx", "act-order")),
        ("weight_scale", torch.ones(256, 5), ("192 inputs cannot have 5 scales",)),
        ("weight_shape", torch.tensor([256, 400]), ("weight_shape", "[256, 400]", "no codes of 4 or 8 bits")),
    ],
)
def test_compressed_tensors_that_do_not_fit(tmp_path, tensors, some, refused, field, value, said):
    parts = as_packed(DOWN, coded(tensors[f"{DOWN}.weight"], 4, 64)) | {f"{DOWN}.{field}": value}
    refused(lambda: open_source(write(tmp_path / "source", some, {DOWN: parts}, compressed(weights()))), *said)


# --- FP8 whose scales are exponents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_ue8m0_scales(tmp_path, tensors, dtype):
    folder, expected = formats.fp8(tmp_path / "source", tensors, exponents=dtype, scale_fmt="ue8m0")
    source = open_source(folder)
    assert source.format == "block-scaled FP8"
    assert_same(source, expected)


def test_every_exponent_of_ue8m0(tmp_path, refused):
    """2 ** -127 to 2 ** 127, and 255 for NaN, which is named when it is read."""
    exponents = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    weight = {f"{DOWN}.weight": torch.ones(1, 256).to(torch.float8_e4m3fn), f"{DOWN}.weight_scale_inv": exponents}
    config = {"quant_method": "fp8", "weight_block_size": [1, 1], "scale_fmt": "ue8m0"}
    tensor = open_source(formats.write(tmp_path / "source", weight, config)).tensors[f"{DOWN}.weight"]
    values = read_in_blocks(tensor)[0]
    assert [float(v) for v in values[:255]] == [2.0 ** (e - 127) for e in range(255)] and np.isnan(values[255])


def test_bytes_as_scales_need_a_name(tmp_path, tensors, refused):
    few = {n: tensors[n] for n in (f"{DOWN}.weight", "norm.weight")}
    folder, _ = formats.fp8(tmp_path / "source", few, exponents=torch.uint8)
    refused(lambda: open_source(folder), f"{DOWN}.weight_scale_inv", "U8", "scale_fmt does not say ue8m0")
    folder, _ = formats.fp8(tmp_path / "other", few, scale_fmt="ue4m3")
    refused(lambda: open_source(folder), f"{DOWN}.weight", "scale_fmt ue4m3")


# --- MLX -------------------------------------------------------------------------------------------------------------------


def mlx(folder, tensors, quantization):
    folder.mkdir()
    stored = {f"language_model.model.{DOWN}.weight": torch.zeros(256, 24, dtype=torch.uint32)}
    if quantization:
        stored |= {f"language_model.model.{DOWN}.{field}": torch.ones(256, 3) for field in ("scales", "biases")}
    save_file(stored, folder / "model.safetensors", metadata={"format": "mlx"})
    more = {"quantization": quantization, "quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(formats.CONFIG | more))
    return folder


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        ({"group_size": 64, "bits": 4}, "4 bits in groups of 64, affine"),
        ({"group_size": 32, "bits": 8, "mode": "mxfp8"}, "8 bits in groups of 32, mxfp8"),
        (None, "unquantised"),
    ],
)
def test_mlx_is_called_mlx(tmp_path, tensors, refused, quantization, form):
    folder = mlx(tmp_path / "source", tensors, quantization)
    refused(lambda: open_source(folder), "this is an MLX checkpoint", form, DOWN, "GPTQ, compressed-tensors or GGUF")
    if quantization:
        refused(lambda: ModelConfig.from_hf(folder), "config.json: this is an MLX checkpoint", form)
    refused(lambda: open_weights(folder), "this is an MLX checkpoint", DOWN)
