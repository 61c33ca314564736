"""Sampling defaults from a checkpoint directory."""

import json
import math
from pathlib import Path

import pytest
import transformers

from ninfer_jax import SamplingParams
from ninfer_jax.text import GenerationDefaults


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_published_values(tmp_path: Path):
    content = {"bos_token_id": 248044, "do_sample": True, "eos_token_id": [248046, 248044], "pad_token_id": 248044}
    content |= {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "transformers_version": "5.0"}
    write(tmp_path, "generation_config.json", content)
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert defaults == GenerationDefaults((248046, 248044), 248044, True, 1.0, 20, 0.95, 0.0, 1.0)
    assert defaults.effective_temperature == 1.0


@pytest.mark.parametrize("config", [{"eos_token_id": 7}, {"text_config": {"eos_token_id": 7}}])
def test_without_the_file(tmp_path: Path, config: dict):
    write(tmp_path, "config.json", config)
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults((7,), None, True, 1.0, 0, 1.0, 0.0, 1.0)


def test_explicit_zeros_count_and_nulls_do_not(tmp_path: Path):
    content = {"eos_token_id": 0, "temperature": 0, "top_k": None, "top_p": 0.0, "min_p": 1, "pad_token_id": 0}
    write(tmp_path, "generation_config.json", content)
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert (defaults.eos_ids, defaults.pad_id, defaults.temperature) == ((0,), 0, 0.0)
    assert (defaults.top_k, defaults.top_p, defaults.min_p) == (0, 0.0, 1.0)


def test_no_sampling_is_greedy(tmp_path: Path):
    write(tmp_path, "generation_config.json", {"eos_token_id": 7, "do_sample": False, "temperature": 0.7})
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert defaults.temperature == 0.7 and defaults.effective_temperature == 0.0


def test_ids_missing_in_the_file_come_from_the_config(tmp_path: Path):
    write(tmp_path, "generation_config.json", {"temperature": 0.5})
    write(tmp_path, "config.json", {"eos_token_id": [7, 8, 7], "pad_token_id": 9})
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert (defaults.eos_ids, defaults.pad_id, defaults.temperature) == ((7, 8), 9, 0.5)


@pytest.mark.parametrize(
    "entry",
    [
        *({"temperature": value} for value in (-0.1, "1", True, float("nan"), float("inf"), 100.5)),
        *({"top_k": value} for value in (-1, 1.5, True)),
        *({"top_p": value} for value in (-0.1, 1.1)),
        *({"min_p": value} for value in (-0.1, 1.1)),
        *({"repetition_penalty": value} for value in (0, -1, 1e-4, 1001)),
        *({key: value} for key in ("presence_penalty", "frequency_penalty") for value in (-101, 100.1, "0", float("nan"))),
        *({"max_new_tokens": value} for value in (0, -1, 2.0, 1 << 31)),
        *({"stop_strings": value} for value in ("", ["a", ""], [3], {"a": 1})),
        {"top_k": 1 << 31},
        *({"eos_token_id": value} for value in ([], "x", -1, [1, "x"], True)),
        *({"do_sample": value} for value in (1, "yes")),
        *({"pad_token_id": value} for value in (-1, [0])),
        *({"num_beams": 4}, {"bad_words_ids": [[1]]}, {"typical_p": 0.9}, {"tempreture": 1}, {"min_new_tokens": 4}),
    ],
    ids=str,
)
def test_bad_values_are_named(tmp_path: Path, entry: dict):
    write(tmp_path, "generation_config.json", {"eos_token_id": 7} | entry)
    ((key, value),) = entry.items()
    with pytest.raises(ValueError, match=r"generation_config\.json: ") as caught:
        GenerationDefaults.from_dir(tmp_path)
    assert f"{key}={value!r}" in str(caught.value)


def test_what_sampling_has_becomes_a_default(tmp_path: Path):
    content = {"eos_token_id": 7, "presence_penalty": 1.5, "frequency_penalty": -0.25, "max_new_tokens": 40, "temperature": 0.5}
    write(tmp_path, "generation_config.json", content | {"stop_strings": "END", "repetition_penalty": 1.1, "top_k": 20})
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert SamplingParams(**defaults.sampling) == SamplingParams(
        temperature=0.5,
        top_k=20,
        repetition_penalty=1.1,
        presence_penalty=1.5,
        frequency_penalty=-0.25,
        max_new_tokens=40,
        stop=("END",),
    )
    write(tmp_path, "generation_config.json", {"eos_token_id": 7, "stop_strings": ["a", "b"], "do_sample": False})
    assert GenerationDefaults.from_dir(tmp_path).sampling == GenerationDefaults((7,), do_sample=False, stop=("a", "b")).sampling


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("temperature", (0.0, 100.0)),
        ("top_k", (0, (1 << 31) - 1)),
        ("top_p", (0.0, 1.0)),
        ("min_p", (0.0, 1.0)),
        ("presence_penalty", (-100.0, 100.0)),
        ("frequency_penalty", (-100.0, 100.0)),
        ("repetition_penalty", (1e-3, 1e3)),
        ("max_new_tokens", (1, (1 << 31) - 1)),
    ],
)
def test_a_file_may_say_what_a_request_may(tmp_path: Path, key: str, bounds: tuple):
    """Refused or taken alike, so that nothing a file says fails only when the first request comes."""
    whole = isinstance(bounds[0], int)
    steps = (-1, 0, 1) if whole else (-math.inf, 0, math.inf)
    for value in {bound + step if whole else math.nextafter(bound, step) if step else bound for bound in bounds for step in steps}:
        write(tmp_path, "generation_config.json", {"eos_token_id": 7, key: value})
        outcomes = []
        for make in (GenerationDefaults.from_dir, lambda _, value=value: SamplingParams(**{key: value})):
            try:
                outcomes.append(make(tmp_path) is not None)
            except ValueError:
                outcomes.append(False)
        assert outcomes[0] == outcomes[1] or (key, value) == ("top_k", -1), value


def test_every_key_that_transformers_writes_is_known(tmp_path: Path):
    """With the values that its documentation gives as those that do nothing; older versions write all of them."""
    inert = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1.0, "top_h": 1.0, "penalty_alpha": 0}
    inert |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0, "guidance_scale": 1, "min_length": 0}
    inert |= {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "token_healing": False, "remove_invalid_values": False}
    inert |= {"length_penalty": 1.0, "diversity_penalty": 0.0, "early_stopping": False, "renormalize_logits": False}
    inert |= {"suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [], "min_new_tokens": 0, "use_cache": True}
    inert |= {"output_scores": False, "num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4, "prefill_chunk_size": 64}
    content = transformers.GenerationConfig(**inert, do_sample=True, eos_token_id=7).to_dict()
    assert len(content) > 60 and inert.keys() <= content.keys()
    write(tmp_path, "generation_config.json", content)
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults((7,))
    # How a program goes about it, and what drafts are made by: any value is fine.
    technical = {"cache_implementation": "static", "cache_config": {"nbits": 4}, "max_cache_len": 64, "compile_config": {"a": 1}}
    technical |= {
        "disable_compile": True,
        "assistant_lookbehind": 10,
        "target_lookbehind": 10,
        "use_mtp": True,
        "is_assistant": True,
    }
    technical |= {
        "num_assistant_tokens_schedule": "constant",
        "assistant_early_exit": 3,
        "prompt_lookup_num_tokens": 3,
        "low_memory": 1,
    }
    assert technical.keys() <= content.keys()
    write(tmp_path, "generation_config.json", content | technical)
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults((7,))
    for key in content.keys() - inert.keys() - {"_from_model_config", "transformers_version"}:
        write(tmp_path, "generation_config.json", {"eos_token_id": 7} | {key: {"some": "value"}})
        try:
            GenerationDefaults.from_dir(tmp_path)
        except ValueError as error:
            assert key in str(error)


def test_a_key_without_a_counterpart_is_noted(tmp_path: Path):
    write(tmp_path, "generation_config.json", {"eos_token_id": 7, "max_length": 2048})
    (note,) = GenerationDefaults.from_dir(tmp_path).notes
    assert note.startswith("generation_config.json: max_length=2048 is not used")


def test_an_end_token_may_be_missing_where_none_is_needed(tmp_path: Path):
    assert GenerationDefaults.from_dir(tmp_path, needs_eos=False).eos_ids == ()


def test_byte_order_marks(tmp_path: Path):
    for name, content in (("generation_config.json", {"top_k": 3}), ("config.json", {"eos_token_id": 7})):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults((7,), top_k=3)


def test_neutral_values_of_other_methods_are_fine(tmp_path: Path):
    content = {"eos_token_id": 7, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": None}
    write(tmp_path, "generation_config.json", content)
    assert GenerationDefaults.from_dir(tmp_path).eos_ids == (7,)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("generation_config.json", "{", "generation_config.json is not JSON"),
        ("generation_config.json", '{"top_k": 1, "top_k": 2}', "generation_config.json lists top_k twice"),
        ("generation_config.json", "[]", "generation_config.json: must be a JSON object"),
        ("config.json", {"eos_token_id": "x"}, "config.json: eos_token_id='x', allowed is an id or a list of ids"),
        ("config.json", {}, "neither generation_config.json nor config.json names an eos_token_id"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: object, error: str):
    write(tmp_path, name, content)
    with pytest.raises(ValueError, match=error):
        GenerationDefaults.from_dir(tmp_path)
