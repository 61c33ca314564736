"""MODEL means one thing alone, told by its text and by what lies here; what is a path never becomes a Hub id, nor the other way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.config import PRESETS, preset
from ninfer_jax.files import FileError
from ninfer_jax.models import HubName, Preset, checked, read_name, short_name


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Qwen/Qwen3.8-27B", HubName("Qwen/Qwen3.8-27B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name-GGUF:Q4_K_M", HubName("org/name-GGUF", "main", "Q4_K_M")),
        ("org/name@abc:BF16/x-00001-of-00002.gguf", HubName("org/name", "abc", "BF16/x-00001-of-00002.gguf")),
        ("org/name:x.gguf", HubName("org/name", "main", "x.gguf")),
        ("hf:org/name", HubName("org/name")),
        ("hf://org/name.gguf", HubName("org/name.gguf")),
        ("qwen3_8_27b", Preset("qwen3_8_27b")),
        ("qwen3.8-27b", Preset("qwen3_8_27b")),
        ("Qwen3.6_27B", Preset("qwen3_6_27b")),
    ],
)
def test_what_a_text_means(home: Path, text: str, meant: object) -> None:
    assert read_name(text) == meant
    if isinstance(meant, HubName):
        assert read_name(f"hf:{meant}") == meant


def test_presets_are_found_in_any_spelling() -> None:
    for name in PRESETS:
        for spelling in (name, name.upper(), name.replace("_", "-"), name.replace("_", "."), name.replace("_", " ")):
            assert preset(spelling) is PRESETS[name]
    with pytest.raises(ValueError, match="preset 'qwen4' is unknown"):
        preset("qwen4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere", "nowhere: No such file or directory; a model is a directory, a GGUF file, a Hub id"),
        ("./org/name", "No such file or directory"),
        ("/org/name", "No such file or directory"),
        ("../name", "No such file or directory"),
        ("a/b/c", "No such file or directory"),
        ("org/name.gguf", "org/name.gguf: No such file or directory"),
        ("org/weights.safetensors", "No such file or directory"),
        ("folder/name", "(folder is a directory here, so this is a path; hf:folder/name is the Hub's)"),
        ("folder/name:x.gguf", "No such file or directory"),
        ("https://huggingface.co/org/name", "a model is named, not linked to: org/name"),
        ("hf:name", "a Hub id is org/name"),
        ("hf:../name", "a Hub id is org/name"),
        ("hf:/etc/passwd", "a Hub id is org/name"),
        ("org/..", "No such file or directory"),
        ("org/na me", "No such file or directory"),
        ("org/name@", "No such file or directory"),
    ],
)
def test_what_is_no_model_goes_nowhere(home: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninfer_jax.models.hub.fetch", lambda *_, **__: pytest.fail("asked the network"))
    (home / "folder").mkdir()
    with pytest.raises(FileError) as caught:
        checked(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_lies_here_is_meant_and_the_other_is_named_where_it_is_no_model(home: Path) -> None:
    (home / "org" / "name").mkdir(parents=True)
    assert read_name("org/name") == Path("org/name") and read_name("hf:org/name") == HubName("org/name")
    (home / "org" / "name" / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError, match="org/name holds an adapter.*; hf:org/name is the Hub's"):
        checked("org/name")
    (home / "qwen3.8-27b").mkdir()
    assert read_name("qwen3.8-27b") == Path("qwen3.8-27b")


def test_a_path_object_is_a_path(home: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_name(Path("org/name"))
    assert read_name(Path("tiny")) == read_name("tiny") == tiny_path()
    assert checked("tiny").bundled and checked(tiny_path()).bundled  # type: ignore[union-attr]


def test_a_preset_has_no_weights(home: Path) -> None:
    with pytest.raises(FileError, match="qwen3_8_27b names shapes alone, for plan and compile"):
        checked("Qwen3.8-27B")


def test_short_names(home: Path) -> None:
    (home / "q4.gguf").write_bytes(b"GGUF")
    wanted = {"org/name@v1": "name", "org/name:x-Q4.gguf": "name:x-Q4", "org/name:Q4": "name:Q4", "q4.gguf": "q4", "tiny": "tiny"}
    assert {text: short_name(text) for text in wanted} == wanted
