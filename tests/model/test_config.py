"""config.json in: both model types accepted, every key or value that would change the computation refused by name.
EngineConfig's bounds."""

import copy
import json
import logging
import re

import pytest

from ninfer_jax.config import FULL, LINEAR, MAX_CONTEXT, EngineConfig, ModelConfig, config_notes, preset

# The published config.json of Qwen3.8-27B; that of Qwen3.6-27B has the same values in every key that shapes the text tower.
QWEN_27B_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": QWEN_27B_TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "5.8.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def text(**changes):
    return {k: v for k, v in (copy.deepcopy(QWEN_27B_TEXT) | changes).items() if v != "absent"}


def rope(**changes):
    return text(rope_parameters={k: v for k, v in (QWEN_27B_TEXT["rope_parameters"] | changes).items() if v != "absent"})


def refused(config, *parts):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(config)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in ("config.json", *parts):
        assert str(part) in message, message


@pytest.mark.parametrize("name", ["qwen3_8_27b", "qwen3_6_27b"])
def test_the_published_config_is_the_preset(name):
    config = ModelConfig.from_hf(QWEN_27B)
    assert config == preset(name)
    assert (config.layers, len(config.gdn_layers), config.attention_layers[:2]) == (64, 48, (3, 7))
    assert (config.conv_channels, config.rotary_dim) == (10240, 64)


def test_unknown_preset():
    with pytest.raises(ValueError, match="'qwen3_8_9b'.*qwen3_6_27b, qwen3_8_27b"):
        preset("qwen3_8_9b")


def test_both_model_types_and_both_ways_to_name_the_file(tmp_path):
    assert ModelConfig.from_hf(QWEN_27B_TEXT) == ModelConfig.from_hf(QWEN_27B)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN_27B))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(str(file)) == preset("qwen3_8_27b")


def test_layer_types_derived_from_the_interval():
    config = ModelConfig.from_hf(text(layer_types="absent", num_hidden_layers=7, full_attention_interval=3))
    assert config.layer_types == (LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR)


def test_tied_embeddings_may_stand_outside_the_text_config():
    assert ModelConfig.from_hf(
        QWEN_27B | {"text_config": text(tie_word_embeddings="absent"), "tie_word_embeddings": True}
    ).tied_embeddings
    assert ModelConfig.from_hf(text(tie_word_embeddings=True)).tied_embeddings


def test_rope_values_may_stand_beside_rope_parameters():
    moved = text(rope_theta=5e6, partial_rotary_factor=0.5)
    moved["rope_parameters"] = {"rope_type": "default", "mrope_section": [22, 22, 20]}
    config = ModelConfig.from_hf(moved)
    assert (config.rope_theta, config.rotary_dim) == (5e6, 128)


def test_output_gate_type_may_be_absent():
    assert ModelConfig.from_hf(text(output_gate_type="absent")) == preset("qwen3_8_27b")


@pytest.mark.parametrize("kind", ["qwen3_next", "llama", None])
def test_another_model_type(kind):
    refused(text(model_type=kind), "model_type", repr(kind), "qwen3_5", "qwen3_5_text")


def test_another_text_model_type():
    refused(QWEN_27B | {"text_config": text(model_type="qwen3_5_moe_text")}, "text_config.model_type", "qwen3_5_moe_text")


@pytest.mark.parametrize("inner", [None, "text", []])
def test_no_text_config(inner):
    refused(QWEN_27B | {"text_config": inner}, "text_config")


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("mtp_use_dedicated_embeddings", True),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("mlp_only_layers", [0]),
        ("num_experts", 64),
        ("a_key_of_tomorrow", 1),
        ("mtp_num_hidden_layers", 2),
        ("num_key_value_heads", 5),
        ("linear_num_value_heads", 40),
        ("linear_conv_kernel_dim", 1),
        ("head_dim", 96),
    ],
)
def test_a_value_that_is_not_implemented(key, value):
    refused(text(**{key: value}), key, value)
    refused(QWEN_27B | {"text_config": text(**{key: value})}, key, value)


@pytest.mark.parametrize("key", ["quantization_config", "a_key_of_tomorrow"])
def test_a_key_outside_the_text_config(key):
    refused(QWEN_27B | {key: {"quant_method": "awq"}}, key, "awq")


def test_a_quantised_checkpoint_says_what_to_do():
    refused(text(quantization_config={"quant_method": "fp8"}), "quantization_config", "fp8", "convert")


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope_type", "yarn"),
        ("type", "mrope"),
        ("mrope_interleaved", False),
        ("factor", 4.0),
        ("mrope_section", [11, 11, 11]),
        ("partial_rotary_factor", 2.0),
    ],
)
def test_rope_that_is_not_implemented(key, value):
    refused(rope(**{key: value}), key)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
    ],
)
def test_a_missing_key(key):
    refused(text(**{key: "absent"}), key, "missing")


@pytest.mark.parametrize("key", ["rope_theta", "mrope_section"])
def test_a_missing_rope_key(key):
    refused(rope(**{key: "absent"}), key)


@pytest.mark.parametrize(
    "config, parts",
    [
        (text(num_hidden_layers=63), ("layer_types", 64, 63)),
        (text(layer_types=[LINEAR, "sliding_attention"] * 32), ("layer_types", "sliding_attention")),
        (text(layer_types="absent", full_attention_interval="absent"), ("layer_types", "full_attention_interval")),
        (text(layer_types="absent", num_hidden_layers="absent"), ("layer_types", "num_hidden_layers")),
    ],
)
def test_layer_types_that_do_not_add_up(config, parts):
    refused(config, *parts)


@pytest.mark.parametrize(
    "key, value",
    [
        ("vocab_size", "248320"),
        ("vocab_size", 0),
        ("hidden_size", 5120.0),
        ("num_attention_heads", -24),
        ("num_key_value_heads", 0),
        ("linear_num_key_heads", 0),
        ("head_dim", True),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", 0),
        ("num_hidden_layers", "64"),
        ("mtp_num_hidden_layers", True),
        ("mtp_num_hidden_layers", -1),
        ("tie_word_embeddings", "no"),
        ("layer_types", 5),
        ("layer_types", []),
        ("layer_types", [["full_attention"]] * 64),
    ],
)
def test_a_value_that_is_no_size(key, value):
    refused(text(**{key: value}), f"{key} is {value!r}")


def test_an_interval_that_is_no_size():
    refused(text(layer_types="absent", full_attention_interval=0), "full_attention_interval is 0")


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope_theta", "1e7"),
        ("rope_theta", -1.0),
        ("rope_theta", float("nan")),
        ("partial_rotary_factor", "0.25"),
        ("mrope_section", 32),
    ]
    + [("mrope_section", bad) for bad in ([40, -4, -4], [16, 16], ["11", "11", "10"])],
)
def test_a_rope_value_that_is_no_number(key, value):
    refused(rope(**{key: value}), f"{key} is {value!r}")


@pytest.mark.parametrize("content, what", [(None, "No such file"), ("{", "is not JSON"), ("[1]", "list")])
def test_a_file_that_is_no_config(tmp_path, content, what):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    refused(tmp_path, file, what)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(QWEN_27B))
    assert ModelConfig.from_hf(tmp_path) == preset("qwen3_8_27b")


# --- Keys that are not read ---

PROVENANCE = [
    ("unsloth_fixed_mtp", True),
    ("unsloth_fixed", True),
    ("unsloth_version", "2026.9.1"),
    ("_commit_hash", "1d4bf0f2"),
    ("_comment", ["made", "by hand"]),
    ("quantized_by", "somebody"),
    ("license", "apache-2.0"),
    ("created_at", 1786500000),
    ("format_version", 2),
    ("release-date", 20260812),
    ("training_seed", 7),
    ("source_repo", {"url": "https://example.org", "private": False, "files": ["a"]}),
    ("mergekit_method", "slerp"),
    ("hf_library", None),
]


@pytest.mark.parametrize("key, value", PROVENANCE)
def test_a_key_that_says_where_the_file_comes_from_is_noted(caplog, key, value):
    caplog.set_level(logging.INFO)
    ways = {
        key: QWEN_27B | {key: value},
        f"text_config.{key}": QWEN_27B | {"text_config": text(**{key: value})},
        f"rope_parameters.{key}": QWEN_27B | {"text_config": rope(**{key: value})},
    }
    for named, config in ways.items():
        caplog.clear()
        assert ModelConfig.from_hf(config) == preset("qwen3_8_27b")
        (note,) = config_notes(config)
        assert note.startswith(f"config.json: {named} ({value!r}") and caplog.messages == [note]
    assert config_notes(QWEN_27B) == []


@pytest.mark.parametrize(
    "key, value",
    [
        ("a_key_of_tomorrow", 1),
        ("a_key_of_tomorrow", "new"),
        ("a_key_of_tomorrow", True),
        ("unsloth_fixed_mtp", 2),  # a number may be a size
        ("unsloth_options", {"alpha": [0.5]}),
        ("mergekit_weights", [1, 2]),
        ("unsloth_rope_fix", True),  # a word of an architecture
        ("_attn_logit_softcapping", 30.0),
        ("attention_version", "2"),
        ("norm_source", "previous"),
        ("merged_residual", True),
        ("position_embedding_type", "alibi"),
        ("num_nextn_predict_layers", 1),
        ("embedding_multiplier", 2.0),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("qkv_bias", True),
        ("pruned_heads", {"3": [0]}),
    ],
)
def test_a_key_that_may_change_the_computation_is_refused(key, value):
    for config in (text(**{key: value}), QWEN_27B | {key: value}, QWEN_27B | {"text_config": text(**{key: value})}):
        refused(config, key, value)
    refused(rope(**{key: value}), f"rope_parameters.{key}", value)


@pytest.mark.parametrize(
    "key, value",
    [
        ("audio_token_id", 248076),
        ("image_token_index", 248056),
        ("hidden_dropout", 0.1),
        ("num_beams", 4),
        ("temperature", 0.7),
        ("_attn_implementation", "sdpa"),
        ("transformers.js_config", {"kv_cache_dtype": {"fp16": "float16"}}),
        ("vision_config", {"depth": 99, "a_key_of_tomorrow": [1.5], "unsloth_fixed_mtp": True}),
        ("base_model", "Qwen/Qwen3.8-27B"),
        ("mlp_bias", False),
        ("quantization_config", {}),
    ],
)
def test_a_key_that_is_known_not_to_matter(key, value):
    for config in (text(**{key: value}), QWEN_27B | {key: value}):
        assert ModelConfig.from_hf(config) == preset("qwen3_8_27b") and config_notes(config) == []


def test_copies_of_the_text_models_keys_outside_it_must_agree():
    """Some tools write them there too; what is only outside is not the text model's, but for two of them."""
    assert ModelConfig.from_hf(QWEN_27B | {"vocab_size": 248320, "mtp_num_hidden_layers": 1}) == preset("qwen3_8_27b")
    refused(QWEN_27B | {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers", "1 in text_config", "0 outside")
    refused(QWEN_27B | {"hidden_size": 4096}, "hidden_size", "5120 in text_config", "4096 outside")
    refused(QWEN_27B | {"hidden_size": 4096, "text_config": text(hidden_size="absent")}, "hidden_size", "4096 outside")
    without = QWEN_27B | {"text_config": text(mtp_num_hidden_layers="absent")}
    assert ModelConfig.from_hf(without).mtp_layers == 0
    assert ModelConfig.from_hf(without | {"mtp_num_hidden_layers": 1}).mtp_layers == 1


# --- EngineConfig ---


@pytest.mark.parametrize(
    "field, low, high",
    [("slots", 1, 4), ("draft", 0, 5), ("context", 1, MAX_CONTEXT), ("pool", 1, 4 * MAX_CONTEXT), ("prefill_chunk", 64, 8192)],
)
def test_bounds(field, low, high):
    for value in (low, high):
        assert getattr(EngineConfig(**{field: value}), field) == value
    for value in (low - 1, high + 1, 1.5, "2", True):
        with pytest.raises(ValueError, match=rf"^{field} is .*{value}.* from {low} to {high}$"):
            EngineConfig(**{field: value})


def test_prefill_chunk_is_whole_blocks():
    with pytest.raises(ValueError, match="prefill_chunk is 100, it must be a multiple of 64"):
        EngineConfig(prefill_chunk=100)


@pytest.mark.parametrize(
    "field, value, known", [("kv", "fp8", "rk4v4-e8"), ("dtype", "float16", "bfloat16"), ("drafter", "eagle", "lookup")]
)
def test_unknown_formats(field, value, known):
    with pytest.raises(ValueError, match=f"{value}.*{known}"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("drafter", ["lookup", "mtp+lookup"])
def test_who_looks_up_needs_drafts_to_make(drafter):
    with pytest.raises(ValueError, match=re.escape(f"drafter is '{drafter}', but draft is 0") + ".*set draft from 1 to 5$"):
        EngineConfig(drafter=drafter, draft=0)
    assert EngineConfig(drafter=drafter).draft is None  # and so open
    assert [EngineConfig(draft=1, drafter=d).mtp for d in ("mtp", "mtp+lookup", "lookup", "none")] == [True, True, False, False]


def test_defaults_ask_for_nothing():
    config = EngineConfig()
    assert config.drafter == "mtp" and not config.mtp
    assert (config.slots, config.draft, config.context, config.kv, config.dtype) == (None, None, None, None, "auto")
