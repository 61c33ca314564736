"""The files of a repository that are fetched, by its listing alone."""

from __future__ import annotations

import pytest

from ninfer_jax.files import FileError
from ninfer_jax.models import HubName
from ninfer_jax.models.choice import small_files, weight_files

REPO = HubName("org/name")
TWO = ("x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-F16.gguf")
SPLIT = ("BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf")


def sizes(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 1_500_000_000)


def test_of_a_large_repository_the_model_alone() -> None:
    names = sizes(
        "README.md", "config.json", "tokenizer.json", "vocab.json", "modeling_x.py", "pytorch_model.bin", "chat_template.jinja",
        "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors", "mtp.safetensors", "consolidated.safetensors",
        "onnx/model.onnx", "generation_config.json",
    )  # fmt: skip
    index = "model.safetensors.index.json"
    assert small_files(names) == ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", index]
    shards = ["model-2.safetensors", "model-1.safetensors"]
    assert weight_files(REPO, names, shards) == [*shards, "mtp.safetensors"]
    assert weight_files(REPO, sizes("model.safetensors", "consolidated.safetensors"), []) == ["model.safetensors"]
    assert weight_files(REPO, sizes("weights.safetensors", "model_mtp.safetensors"), []) == [
        "weights.safetensors",
        "model_mtp.safetensors",
    ]


def test_of_several_gguf_models_the_one_that_is_named() -> None:
    def chosen(file: str | None, *names: str) -> list[str]:
        return weight_files(HubName("org/name", file=file), sizes(*names), [])

    assert chosen(None, "x-Q4_K_M.gguf", "mmproj-F16.gguf") == ["x-Q4_K_M.gguf"]
    assert chosen(None, *SPLIT) == list(SPLIT)
    assert chosen("x-Q8_0.gguf", *TWO) == chosen("Q8_0", *TWO) == chosen("q8_0", *TWO) == ["x-Q8_0.gguf"]
    assert chosen("BF16", *TWO, *SPLIT) == chosen(SPLIT[0], *TWO, *SPLIT) == list(SPLIT)
    assert chosen("Q4_K_M", *TWO, "model.safetensors") == ["x-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    ("name", "names", "said"),
    [
        ("org/name", TWO, "holds 2 GGUF models, choose one: org/name:x-Q4_K_M.gguf (1.5 GB), org/name:x-Q8_0.gguf (1.5 GB)"),
        ("org/name:Q5", TWO, "org/name has no Q5; it has x-Q4_K_M.gguf, x-Q8_0.gguf"),
        ("org/name:x.gguf", ("model.safetensors",), "has no x.gguf; it has no GGUF file at all"),
        ("org/name:Q4", ("a-Q4.gguf", "b-Q4.gguf"), "2 GGUF models have Q4 in their names, choose one: a-Q4.gguf, b-Q4.gguf"),
        ("org/name", ("README.md",), "holds no model: neither .safetensors nor .gguf files are in it"),
        ("org/name", ("adapter_config.json", "adapter_model.safetensors"), "it is an adapter, whose base model"),
        ("org/name", ("pytorch_model.bin",), "its weights are .bin, which are not read"),
        ("org/name", ("a.safetensors", "b.safetensors"), "2 .safetensors files but no model.safetensors.index.json"),
    ],
)
def test_what_cannot_be_chosen(name: str, names: tuple[str, ...], said: str) -> None:
    repo, _, file = name.partition(":")
    with pytest.raises(FileError) as caught:
        weight_files(HubName(repo, file=file or None), sizes(*names), [])
    assert said in str(caught.value)


def test_a_shard_that_the_repository_lacks() -> None:
    with pytest.raises(FileError, match=r"index.json names b.safetensors, which the repository lacks"):
        weight_files(REPO, sizes("model.safetensors.index.json", "a.safetensors"), ["a.safetensors", "b.safetensors"])
