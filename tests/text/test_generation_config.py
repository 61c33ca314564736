"""Sampling defaults from a checkpoint directory."""

import json
from pathlib import Path

import pytest

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
        *({"temperature": value} for value in (-0.1, "1", True, float("nan"), float("inf"))),
        *({"top_k": value} for value in (-1, 1.5, True)),
        *({"top_p": value} for value in (-0.1, 1.1)),
        *({"min_p": value} for value in (-0.1, 1.1)),
        *({"repetition_penalty": value} for value in (0, -1)),
        *({"eos_token_id": value} for value in ([], "x", -1, [1, "x"], True)),
        *({"do_sample": value} for value in (1, "yes")),
        *({"pad_token_id": value} for value in (-1, [0])),
        *({"num_beams": 4}, {"bad_words_ids": [[1]]}, {"typical_p": 0.9}, {"tempreture": 1}),
    ],
    ids=str,
)
def test_bad_values_are_named(tmp_path: Path, entry: dict):
    write(tmp_path, "generation_config.json", {"eos_token_id": 7} | entry)
    ((key, value),) = entry.items()
    with pytest.raises(ValueError, match=r"generation_config\.json: ") as caught:
        GenerationDefaults.from_dir(tmp_path)
    assert f"{key}={value!r}" in str(caught.value)


def test_neutral_values_of_other_methods_are_fine(tmp_path: Path):
    content = {"eos_token_id": 7, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": None}
    write(tmp_path, "generation_config.json", content)
    assert GenerationDefaults.from_dir(tmp_path).eos_ids == (7,)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("generation_config.json", "[]", "generation_config.json: must be a JSON object"),
        ("config.json", {"eos_token_id": "x"}, "config.json: eos_token_id='x', allowed is an id or a list of ids"),
        ("config.json", {}, "neither generation_config.json nor config.json names an eos_token_id"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: object, error: str):
    write(tmp_path, name, content)
    with pytest.raises(ValueError, match=error):
        GenerationDefaults.from_dir(tmp_path)
