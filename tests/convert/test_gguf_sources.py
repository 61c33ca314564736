"""GGUF files as they come: with names of Ollama's, beside a config.json that says little, with an MTP layer that the metadata
do not count, and without a suffix."""

from __future__ import annotations

import json
import shutil

import formats
import numpy as np
import pytest
from formats import assert_same

from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.checkpoints.sources import open_source
from ninfer_jax.config import ModelConfig


def inexact_logs(name):
    return not name.endswith("A_log")


def config_of(source):
    return ModelConfig.from_hf(source.config, source.tensors)


def test_a_file_of_ollamas(tmp_path, tensors):
    """`ssm_dt` without `.bias`, `mtp.*` as in the checkpoint, an array of KV heads, three RoPE sections, a vision tower; the
    file's name is a digest."""
    file = tmp_path / "sha256-3d1f"
    meaning = formats.write_gguf(file, tensors, {}, blocks=2, nextn=None, ollama=True)
    source = open_source(file)
    assert_same(source, meaning, exact=inexact_logs)
    for name in ("mtp.norm.weight", "mtp.layers.0.input_layernorm.weight", "layers.0.linear_attn.dt_bias"):
        np.testing.assert_allclose(meaning[name], tensors[name], atol=2e-7)
    assert config_of(source) == ModelConfig.from_hf(formats.CONFIG)
    (note,) = source.notes
    assert "3 tensors of the vision tower are left out" in note and "v.blk.0.attn_q.weight" in note
    assert open_source(tmp_path).path == file  # the directory, where it is the only one


def test_several_blobs_are_not_guessed_among(tmp_path, tensors, refused):
    for name in ("sha256-3d1f", "sha256-77aa"):
        formats.write_gguf(tmp_path / name, {"norm.weight": tensors["norm.weight"]}, {})
    (tmp_path / "sha256-template").write_text("{{ .Prompt }}")
    refused(lambda: open_source(tmp_path), "2 GGUF models", "sha256-3d1f, sha256-77aa")


def test_value_heads_that_were_not_reordered(tmp_path, tensors):
    meaning = formats.write_gguf(tmp_path / "model.gguf", tensors, {}, tile=False)
    np.testing.assert_allclose(meaning["layers.0.linear_attn.out_proj.weight"], tensors["layers.0.linear_attn.out_proj.weight"])
    assert_same(open_source(tmp_path / "model.gguf"), meaning, exact=inexact_logs)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.head_count_kv", [0, 1, 1], None),
        ("attention.head_count_kv", [1, 1], None),
        ("attention.head_count", [0, 2], None),
        ("attention.head_count_kv", [0, 0], "qwen35.attention.head_count_kv is [0, 0]"),
        ("attention.head_count_kv", [2, 1], "qwen35.attention.head_count_kv is [2, 1]"),
        ("attention.head_count_kv", [1], "qwen35.attention.head_count_kv is [1]"),
        ("rope.dimension_sections", [3, 3, 1, 1], "a fourth section"),
    ],
)
def test_numbers_given_for_each_layer(tmp_path, tensors, refused, monkeypatch, key, value, said):
    """Layer 0 has no attention, layer 1 has one KV head and two of queries."""
    add = {"attention.head_count_kv": "add_head_count_kv", "attention.head_count": "add_head_count"}
    name = add.get(key, "add_rope_dimension_sections")
    original = getattr(formats.gguf.GGUFWriter, name)
    monkeypatch.setattr(formats.gguf.GGUFWriter, name, lambda self, _: original(self, value))
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    if said is None:
        assert config_of(open_source(tmp_path)) == ModelConfig.from_hf(formats.CONFIG)
    else:
        refused(lambda: open_source(tmp_path), said)


# --- what lies beside it ---------------------------------------------------------------------------------------------------

STUBS = {
    "an empty object": {},
    "a model type": {"model_type": "qwen3_5"},
    "the whole model's, without the text model's": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "unsloth_fixed": True,
        "vision_config": {"depth": 27},
    },
    "a text model without sizes": {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "rms_norm_eps": None}},
    "half of RoPE": {"model_type": "qwen3_5_text", "rope_parameters": {"rope_theta": 10000.0}, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("stub", STUBS.values(), ids=STUBS)
def test_a_stub_does_not_hide_the_metadata(tmp_path, tensors, stub):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    (tmp_path / "config.json").write_text(json.dumps(stub))
    source = open_source(tmp_path)
    assert config_of(source) == ModelConfig.from_hf(formats.CONFIG)
    assert source.notes[0].startswith("config.json does not give vocab_size, ") and "metadata of model.gguf" in source.notes[0]


@pytest.mark.parametrize("rope", [{"rope_parameters": {"rope_theta": 5e6}}, {"rope_theta": 5e6}])
def test_what_a_config_says_counts_and_differences_are_noted(tmp_path, tensors, rope):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    given = {"model_type": "qwen3_5", "text_config": {"rms_norm_eps": 1e-5, **rope}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    source = open_source(tmp_path)
    config = config_of(source)
    assert (config.rms_norm_eps, config.rope_theta, config.hidden_size) == (1e-5, 5e6, formats.HIDDEN)
    assert source.notes[1] == "config.json and the metadata of model.gguf differ in rms_norm_eps, rope_theta: config.json counts"


def test_a_stub_of_another_model_is_refused(tmp_path, tensors, refused):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(lambda: config_of(open_source(tmp_path)), "model_type is 'llama'")


def test_a_complete_config_is_enough_where_metadata_are_not(tmp_path, tensors, refused, monkeypatch):
    monkeypatch.setattr(formats.gguf.GGUFWriter, "add_context_length", lambda self, length: None)
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    refused(lambda: open_source(tmp_path), "metadata lack qwen35.context_length")
    (tmp_path / "config.json").write_text(json.dumps(formats.CONFIG))
    assert config_of(open_source(tmp_path)) == ModelConfig.from_hf(formats.CONFIG)


def test_a_tokenizer_beside_does_not_hide_the_template(tmp_path, tensors):
    """Each of the small files comes from the metadata where it does not lie beside."""
    formats.write_gguf(tmp_path / "model.gguf", tensors, {})
    shutil.copy(tiny_path() / "tokenizer.json", tmp_path / "tokenizer.json")
    source = open_source(tmp_path)
    assert set(source.companions) == {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
    assert source.companions["tokenizer.json"] == (tiny_path() / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert "chat_template.jinja" not in open_source(tmp_path).companions


# --- the MTP layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "nextn"), [(3, None), (2, None), (2, 1), (3, 1)])
def test_an_mtp_layer_is_taken_however_it_is_counted(tmp_path, tensors, blocks, nextn):
    meaning = formats.write_gguf(tmp_path / "model.gguf", tensors, {}, blocks=blocks, nextn=nextn)
    source = open_source(tmp_path)
    assert_same(source, meaning, exact=inexact_logs)
    assert config_of(source) == ModelConfig.from_hf(formats.CONFIG)


def test_a_config_beside_that_does_not_count_the_mtp_layer(tmp_path, tensors):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {}, nextn=None)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in formats.CONFIG.items() if "mtp" not in k}))
    assert config_of(open_source(tmp_path)).mtp_layers == 1


def without(tensors, *ends):
    return {n: t for n, t in tensors.items() if not n.endswith(ends)}


@pytest.mark.parametrize("ollama", [False, True])
def test_half_an_mtp_layer_that_nothing_counts_is_refused(tmp_path, tensors, refused, ollama):
    half = without(tensors, "mtp.layers.0.self_attn.o_proj.weight")
    formats.write_gguf(tmp_path / "model.gguf", half, {}, blocks=2 if ollama else 3, nextn=None, ollama=ollama)
    refused(lambda: open_source(tmp_path), "qwen35.nextn_predict_layers", "lack 1 of 15", "mtp.layers.0.self_attn.o_proj.weight")


def test_an_mtp_layer_that_the_metadata_deny(tmp_path, tensors, refused):
    formats.write_gguf(tmp_path / "model.gguf", tensors, {}, nextn=0)
    refused(lambda: open_source(tmp_path), "qwen35.nextn_predict_layers is 0", "blocks [2]")


def test_a_file_without_an_mtp_layer(tmp_path, tensors):
    trunk = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    meaning = formats.write_gguf(tmp_path / "model.gguf", trunk, {}, blocks=2, nextn=None)
    source = open_source(tmp_path)
    assert_same(source, meaning, exact=inexact_logs)
    assert not source.has_mtp and config_of(source).mtp_layers == 0
