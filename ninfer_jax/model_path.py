"""Places of models: what people give for one, the bundled `tiny` among it, before anything is read."""

from __future__ import annotations

import os
from pathlib import Path

from ninfer_jax.files import FileError, directory, head_of, kind_of, looks_like, missing, new_directory, shown, user_path

TINY = "tiny"
# What lies beside the weights of a checkpoint and goes with them, where it exists.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_PACKAGE = Path(__file__).resolve().parent


def tiny_path() -> Path:
    """The bundled tiny model: a directory with `model.safetensors`, `config.json` and its tokenizer.

    In a wheel it lies inside the package; in a checkout, and so in an editable install, in the folder that makes it.
    FileError if the installation lacks the weights.
    """
    places = (_PACKAGE / "tiny", _PACKAGE.parent / "weights" / "tiny")
    for place in places:
        if (place / "model.safetensors").is_file():
            return place
    raise FileError(
        f"{next((p for p in places if p.is_dir()), places[0])} lacks model.safetensors: reinstall the package, or train it with "
        "weights/training/train_tiny.py"
    )


def model_path(model: str | os.PathLike[str]) -> Path:
    """The directory that MODEL names; `tiny` is the bundled model where nothing of that name lies in the working directory.

    FileError, one line that says what to do, for everything else that people give: a weights file, a GGUF file, an archive,
    a directory of GGUF files or of an adapter, a pipe or device, a name that is empty, too long or not there.
    """
    path = user_path(model, "model")
    kind = kind_of(path)
    if kind is None:
        if str(path) == TINY:
            return tiny_path()
        raise FileError(f"{missing(path)}; a model is a directory, or `{TINY}` for the bundled one")
    if kind == "a file":
        raise FileError(_instead_of(path, looks_like(head_of(path))))
    directory(path, "model")
    if not (path / "config.json").exists():
        names = sorted(entry.name for entry in os.scandir(path))
        if gguf := next((name for name in names if name.endswith(".gguf")), None):
            raise FileError(f"{path} holds a GGUF file: {_convert(path / gguf)}")
        if "adapter_config.json" in names:
            raise FileError(f"{path} holds an adapter, not a model: merge it into its base model and save that")
    return path


def source_path(source: str | os.PathLike[str]) -> Path:
    """The checkpoint that SRC of a conversion names: a directory, a file of weights, or `tiny`. FileError otherwise."""
    path = user_path(source, "source")
    kind = kind_of(path)
    if kind == "a file":
        found = looks_like(head_of(path))
        if found and "archive" in found:
            raise FileError(_instead_of(path, found))
        return path
    if kind not in (None, "a directory"):
        raise FileError(f"{shown(path)} is {kind}, a checkpoint directory or a file of weights is needed")
    if kind is None and str(path) != TINY:
        raise FileError(missing(path))
    return directory(path, "source") if kind else tiny_path()


def destination_path(destination: str | os.PathLike[str], what: str = "destination", label: str = "") -> Path:
    """The directory that DST of a conversion names: a finished artifact, which need not be writable, or a place for one.
    FileError otherwise. label: goes before the path in messages."""
    path = user_path(destination, what)
    if os.path.isfile(path / "manifest.json"):  # False for a name too long, which the next line names
        return path
    return new_directory(path, what, label)


def _instead_of(path: Path, kind: str | None) -> str:
    """The sentence about a file that was given for a model."""
    if kind == "a GGUF file":
        return f"{path} is a GGUF file: {_convert(path)}"
    if kind == "a safetensors file":
        return f"{path} is a safetensors file: name the directory that holds it and its config.json"
    if kind and "archive" in kind:
        return f"{path} is {kind}: unpack it and name the directory"
    return f"{path} is {kind or 'a file'}: a model is a directory with config.json, tokenizer.json and weights"


def _convert(file: Path) -> str:
    return f"convert it first, with `ninfer-jax convert {file} DST`, and name DST"
