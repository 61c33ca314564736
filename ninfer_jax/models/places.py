"""Places of MODEL on this machine, for whoever needs its weights or its shapes alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.config import PRESETS
from ninfer_jax.files import FileError, head_of, kind_of, looks_like
from ninfer_jax.model_path import COMPANIONS, model_path, source_path, tiny_path
from ninfer_jax.models import hub
from ninfer_jax.models.hub import Snapshot, Tell
from ninfer_jax.models.kept import MANIFEST, Say
from ninfer_jax.models.names import FORCED, HubName, Preset, looks_like_hub, printed, read_name, weights_needed

__all__ = ["Found", "Say", "Tell", "checked", "for_shapes", "found_in", "shapes_in", "source_of"]


@dataclass(frozen=True)
class Found:
    """A model on this machine. path: its directory, or its GGUF file. artifact: whether it is one. quantised: whether its weights
    are codes of another program's, which have to be converted to be run. bundled: whether it is `tiny`."""

    path: Path
    artifact: bool
    quantised: bool
    bundled: bool = False

    def identity(self) -> dict[str, Any]:
        """Facts that tell the content of a checkpoint from another, without reading it."""
        folder = self.path if self.path.is_dir() else self.path.parent
        names = (
            {p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".gguf")} if self.path.is_dir() else {self.path.name}
        )
        names |= {"config.json", "quantize_config.json", "model.safetensors.index.json", *COMPANIONS}
        if self.path.is_file() and "-of-" in self.path.name:
            names |= {p.name for p in folder.glob("*-of-*.gguf")}
        there = {name: os.stat(folder / name) for name in sorted(names) if (folder / name).is_file()}
        return {"path": str(self.path.resolve()), "files": [[n, s.st_size, s.st_mtime_ns] for n, s in there.items()]}


def found_in(snapshot: Snapshot) -> Found:
    """The model of a snapshot."""
    return Found(snapshot.source, False, snapshot.quantised)


def checked(model: str | os.PathLike[str]) -> HubName | Found:
    """MODEL, where its weights are needed, as far as can be told without a network. FileError, one line, for a preset, and for
    a place that holds none."""
    place = read_name(model)
    if isinstance(place, Preset):
        raise weights_needed(place)
    if isinstance(place, HubName):
        return place
    try:
        return _found(place)
    except FileError as error:
        if looks_like_hub(model):
            raise FileError(f"{error}; {FORCED}{model} is the Hub's") from None
        raise


def source_of(model: str | os.PathLike[str], say: Say, tell: Tell) -> Path:
    """The checkpoint that SRC of a conversion names: a directory or a file of weights, fetched if need be. FileError otherwise."""
    place = read_name(model)
    if isinstance(place, Preset):
        raise weights_needed(place)
    return hub.fetch(place, say, tell).source if isinstance(place, HubName) else source_path(place)


def for_shapes(model: str | os.PathLike[str], say: Say, tell: Tell) -> Path | Preset:
    """The directory or GGUF file that has the config and the tokenizer of MODEL, of a repository these files alone; or a preset."""
    place = read_name(model)
    if isinstance(place, Preset):
        return place
    if isinstance(place, HubName):
        before = hub.recorded(place)
        return hub.fetch(place, say, tell, weights=before is not None and before.whole).source
    return _found(place).path


def shapes_in(name: str, say: Say = printed, tell: Tell = lambda stage, done, total: None) -> Path | Preset:
    """The place of a model's config and tokenizer, or a preset; of a Hub id these files are fetched and no weights. ValueError for
    neither."""
    try:
        read_name(name)
    except FileError as error:
        raise ValueError(f"{error}; presets: {', '.join(PRESETS)}") from None
    return for_shapes(name, say, tell)


def _found(place: Path) -> Found:
    if kind_of(place) == "a file":
        if looks_like(head_of(place)) == "a GGUF file":
            return Found(source_path(place), False, True)
        model_path(place)  # raises, and says what to name instead
    if kind_of(place) == "a directory" and not (place / "config.json").exists() and (files := _ggufs(place)):
        if len(files) > 1:
            raise FileError(f"{place} holds {len(files)} GGUF models ({', '.join(f.name for f in files[:8])}): name one of them")
        return Found(files[0], False, True)
    path = model_path(place)
    gguf = not any(path.glob("*.safetensors")) and not (path / MANIFEST).is_file() and _ggufs(path)
    if gguf:
        return Found(path, False, True)
    artifact = (path / MANIFEST).is_file()
    bundled = path.resolve() == tiny_path().resolve() if (path / "model.safetensors").is_file() else False
    return Found(path, artifact, not artifact and hub.quantised_config(path), bundled)


def _ggufs(folder: Path) -> list[Path]:
    """The GGUF models of a directory, of a split one the first part."""
    found = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    return [p for p in found if "-of-" not in p.name or "-00001-of-" in p.name]
