"""Every format against the numbers that it was written from, in blocks of rows, and what is refused."""

from __future__ import annotations

import json
import shutil

import formats
import gguf
import numpy as np
import pytest
import torch
from formats import assert_same, read_in_blocks

from ninfer_jax.checkpoints import save_checkpoint, tiny_path
from ninfer_jax.checkpoints.sources import open_source
from ninfer_jax.config import ModelConfig
from ninfer_jax.text import Tokenizer

Q = gguf.GGMLQuantizationType
GGUF_TYPES = {
    "embed_tokens.weight": Q.Q8_0,
    "lm_head.weight": Q.BF16,
    "layers.0.linear_attn.in_proj_qkv.weight": Q.Q5_1,
    "layers.0.linear_attn.in_proj_z.weight": Q.Q4_0,
    "layers.0.linear_attn.out_proj.weight": Q.Q4_0,
    "layers.0.linear_attn.in_proj_a.weight": Q.F16,
    "layers.0.mlp.gate_proj.weight": Q.Q4_0,
    "layers.0.mlp.up_proj.weight": Q.Q4_0,
    "layers.0.mlp.down_proj.weight": Q.Q5_0,
    "layers.1.self_attn.q_proj.weight": Q.Q4_1,
    "layers.1.self_attn.k_proj.weight": Q.Q4_0,
    "mtp.fc.weight": Q.Q8_0,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain(tmp_path, tensors, dtype):
    values = {name: torch.from_numpy(t).to(dtype).float().numpy() for name, t in tensors.items()}
    source = open_source(formats.plain(tmp_path / "source", values, dtype))
    assert_same(source, values)
    assert source.has_mtp and set(source.companions) == set(formats.COPIED)


def test_block_scaled_fp8(tmp_path, tensors):
    folder, meaning = formats.fp8(tmp_path / "source", tensors)
    source = open_source(folder)
    assert "quantization_config" not in source.config
    assert_same(source, meaning)


@pytest.mark.parametrize(
    ("zero", "config"),
    [
        (7, {}),
        (7, {"checkpoint_format": "gptq"}),
        (8, {"checkpoint_format": "gptq_v2"}),
        (7, {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
        (8, {"quant_method": "auto-round"}),
    ],
)
def test_gptq(tmp_path, tensors, zero, config):
    folder, meaning, codes = formats.gptq(tmp_path / "source", tensors, zero=zero, **config)
    source = open_source(folder)
    assert_same(source, meaning)
    for name, (expected, scales) in codes.items():
        found = source.tensors[name]
        ours = found.read_codes(5, 60)
        assert found.group == 64 and ours[0].dtype == np.int8
        np.testing.assert_array_equal(ours[0], expected[5:60])
        np.testing.assert_array_equal(ours[1], scales[5:60].astype(np.float32))


def test_compressed_tensors(tmp_path, tensors):
    folder, meaning = formats.packed(tmp_path / "source", tensors)
    source = open_source(folder)
    assert_same(source, meaning)
    codes, scales = source.tensors["mtp.fc.weight"].read_codes(0, 7)
    np.testing.assert_array_equal((codes.reshape(7, -1, 32) * scales[..., None]).reshape(7, -1), meaning["mtp.fc.weight"][:7])


def test_gguf(tmp_path, tensors):
    meaning = formats.write_gguf(tmp_path / "model.gguf", tensors, GGUF_TYPES)
    source = open_source(tmp_path / "model.gguf")
    assert_same(source, meaning, exact=lambda name: not name.endswith("A_log"))
    for name in ("norm.weight", "mtp.norm.weight", "layers.0.linear_attn.A_log", "layers.0.linear_attn.conv1d.weight"):
        np.testing.assert_allclose(meaning[name], tensors[name], atol=2e-7)
    assert source.tensors["layers.0.mlp.down_proj.weight"].group is None
    for name in ("layers.0.linear_attn.out_proj.weight", "layers.0.linear_attn.in_proj_z.weight"):
        codes, scales = source.tensors[name].read_codes(0, 99)
        np.testing.assert_array_equal(
            (codes.reshape(*scales.shape, 32) * scales[..., None]).reshape(codes.shape), meaning[name][:99]
        )


def test_gguf_blocks_of_256(tmp_path, tensors):

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (formats.VOCAB, 210), dtype=np.uint8)
    blocks[:, 208:] = np.full((formats.VOCAB, 1), 1e-3, np.float16).view(np.uint8)  # the scale of the whole block, at its end
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen35")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=Q.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from ninfer_jax.checkpoints.sources.gguf_tensors import Heads, gguf_tensors

    tensor = gguf_tensors({tmp_path / "one.gguf": gguf.GGUFReader(tmp_path / "one.gguf")}, 2, Heads(2, 6, 32, 32))[
        "embed_tokens.weight"
    ]
    assert tensor.shape == (formats.VOCAB, 256)
    np.testing.assert_array_equal(read_in_blocks(tensor), gguf.quants.dequantize(blocks, Q.Q6_K))


def test_gguf_alone_brings_config_and_tokenizer(tmp_path, tensors):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    source = open_source(tmp_path)
    assert ModelConfig.from_hf(source.config) == ModelConfig.from_hf(formats.CONFIG)
    ours, theirs = Tokenizer(json.loads(source.companions["tokenizer.json"])), Tokenizer.from_dir(tiny_path())
    text = "def f(x):\n    return x  # <think>Où est 日本?</think><|im_end|>\n"
    for special in (False, True):
        assert ours.encode(text, allow_special=special) == theirs.encode(text, allow_special=special)
    assert (ours.vocab_size, ours.control_tokens, ours.special_ids) == (
        theirs.vocab_size,
        theirs.control_tokens,
        theirs.special_ids,
    )
    assert source.companions["chat_template.jinja"] == (tiny_path() / "chat_template.jinja").read_bytes()
    assert ours.control_tokens["<|im_end|>"] in json.loads(source.companions["generation_config.json"])["eos_token_id"]


def test_files_beside_a_gguf_come_first(tmp_path, tensors):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {}, tokenizer=False)
    (tmp_path / "config.json").write_text(json.dumps(formats.CONFIG | {"max_position_embeddings": 256}))
    shutil.copy(tiny_path() / "tokenizer.json", tmp_path / "tokenizer.json")
    source = open_source(tmp_path)
    assert source.config["max_position_embeddings"] == 256 and set(source.companions) == {"tokenizer.json"}


def replaced(name, value):
    def change(stored):
        stored[name] = value(stored[name]) if callable(value) else value

    return change


DOWN = "layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"change": replaced(f"{DOWN}.g_idx", lambda t: t.flip(0))}, (f"{DOWN}.g_idx", "act-order")),
        ({"change": replaced(f"{DOWN}.qzeros", lambda t: t + 1)}, (f"{DOWN}.qzeros", "asymmetric")),
        ({"zero": 8, "checkpoint_format": "gptq"}, ("qzeros", "asymmetric")),
        ({"zero": 8, "sym": False}, ("qzeros", "asymmetric")),
        ({"bits": 3}, ("qweight", "3 bits")),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, ("auto_awq", "not supported")),
        ({"change": lambda stored: stored.pop(f"{DOWN}.scales")}, (f"{DOWN}.qweight", "no scales")),
        ({"quant_method": "awq"}, ("qweight", "awq is not supported")),
        ({"quant_method": "bitsandbytes"}, ("qweight", "bitsandbytes is not supported")),
    ],
)
def test_gptq_refusals(tmp_path, tensors, refused, options, said):
    folder, *_ = formats.gptq(tmp_path / "source", {n: tensors[n] for n in (f"{DOWN}.weight", "norm.weight")}, **options)
    refused(lambda: open_source(folder), *said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "nvfp4-pack-quantized"}, (f"{DOWN}.weight_packed", "nvfp4-pack-quantized")),
        ({"change": replaced(f"{DOWN}.weight_shape", torch.tensor([1, 2]))}, ("weight_shape", "[1, 2]")),
    ],
)
def test_compressed_tensors_refusals(tmp_path, tensors, refused, options, said):
    folder, _ = formats.packed(tmp_path / "source", {n: tensors[n] for n in (f"{DOWN}.weight", "norm.weight")}, **options)
    refused(lambda: open_source(folder), *said)


def test_fp8_refusals(tmp_path, tensors, refused):
    weight = {f"{DOWN}.weight": torch.zeros(256, 192).to(torch.float8_e4m3fn)}
    refused(
        lambda: open_source(formats.write(tmp_path / "a", weight, {"quant_method": "fp8"})), f"{DOWN}.weight", "weight_block_size"
    )
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    refused(lambda: open_source(formats.write(tmp_path / "b", weight, config)), f"{DOWN}.weight_scale_inv")
    bad = weight | {f"{DOWN}.weight_scale_inv": torch.zeros(2, 1)}
    refused(lambda: open_source(formats.write(tmp_path / "c", bad, config)), "weight_scale_inv", "[2, 2]")
    refused(lambda: open_source(formats.write(tmp_path / "d", weight, None)), f"{DOWN}.weight", "F8_E4M3", "no format known")
    nvfp4 = {f"{DOWN}.weight": torch.zeros(256, 96, dtype=torch.uint8), f"{DOWN}.weight_scale_2": torch.zeros(1)}
    refused(
        lambda: open_source(formats.write(tmp_path / "e", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"})),
        DOWN,
        "modelopt NVFP4",
    )
    refused(lambda: open_source(formats.write(tmp_path / "f", nvfp4, None)), f"{DOWN}.weight_scale_2", "NVFP4")


def test_gguf_refusals(tmp_path, tensors, refused):
    file = tmp_path / "model.gguf"
    formats.write_gguf(file, {"norm.weight": tensors["norm.weight"]}, {}, architecture="llama")
    refused(lambda: open_source(file), file, "architecture is llama")
    formats.write_gguf(file, tensors, {}, tokenizer=False)
    refused(lambda: open_source(file), "tokenizer.json")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(lambda: open_source(file), file, "not a whole GGUF file")
    file.write_bytes(b"GGML" + whole[4:])
    refused(lambda: open_source(file), file, "not a whole GGUF file")
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(whole)
    refused(lambda: open_source(part), "m-00002-of-00002.gguf")
    refused(lambda: open_source(tmp_path), "2 GGUF models")


def test_other_refusals(tmp_path, tensors, refused):
    refused(lambda: open_source(tmp_path / "nothing"), "does not exist")
    save_checkpoint(tmp_path / "made", {"norm.weight": tensors["norm.weight"]}, {})
    (tmp_path / "made" / "manifest.json").write_text("{}")
    refused(lambda: open_source(tmp_path / "made"), "an artifact already")
