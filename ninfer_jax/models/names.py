"""The meaning of MODEL, from its text and from what lies in the working directory: a place on this machine, a Hub id, or a preset.

A text means one thing alone: what exists here is a path, and so is everything that only a path looks like; neither is ever
looked up elsewhere. `./org/name` forces a path, `hf:org/name` the Hub.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ninfer_jax.config import PRESETS, preset_called
from ninfer_jax.files import FileError, kind_of, missing, shown, user_path
from ninfer_jax.model_path import TINY, tiny_path

FORCED = "hf:"
FORMS = f"a model is a directory, a GGUF file, a Hub id (org/name) or `{TINY}`"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?(?::(?P<file>[^:@\\]+))?")
_FILES = (".gguf", ".safetensors", ".json", ".zip", ".tar", ".gz")
MAIN = "main"


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, or one model in it. file: of several GGUF files the one that is meant, by its name or by the
    quantisation in it ("Q4_K_M")."""

    repo: str
    revision: str = MAIN
    file: str | None = None

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{at}" + (f":{self.file}" if self.file else "")

    @property
    def short(self) -> str:
        """The name without its owner, for headers and requests."""
        name = self.repo.rpartition("/")[2]
        return f"{name}:{Path(self.file).stem if self.file.endswith('.gguf') else self.file}" if self.file else name


@dataclass(frozen=True)
class Preset:
    """Shapes without weights, by the name in `PRESETS`."""

    name: str


def read_name(model: object) -> Path | HubName | Preset:
    """MODEL, sorted; a Path exists (`tiny` among them). No network is asked. FileError, one line, for what is none of them."""
    path = user_path(model, "model")
    text = str(model) if isinstance(model, str) else ""  # what comes as a Path is a path
    if text.startswith(FORCED):
        return _hub(text.removeprefix(FORCED).removeprefix("//"), text)
    if re.match(r"https?://", text, re.IGNORECASE):
        raise FileError(f"{shown(text)}: a model is named, not linked to: org/name, org/name@revision or org/name:FILE.gguf")
    if kind_of(path) is not None:
        return path
    if str(path) == TINY:
        return tiny_path()
    if text and (known := preset_called(text)):
        return Preset(known)
    if text and _HUB.fullmatch(text) and not text.lower().endswith(_FILES):
        if (parent := Path(text.partition("/")[0])).is_dir():
            raise FileError(f"{missing(path)} ({parent} is a directory here, so this is a path; {FORCED}{text} is the Hub's)")
        return _hub(text, text)
    if text and (found := _HUB.fullmatch(text)) and found["file"] and not Path(text.partition("/")[0]).is_dir():
        return _hub(text, text)
    raise FileError(f"{missing(path)}; {FORMS}")


def _hub(text: str, given: str) -> HubName:
    found = _HUB.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"]:
        raise FileError(f"{shown(given)}: a Hub id is org/name, org/name@revision or org/name:FILE.gguf")
    return HubName(found["repo"], found["revision"] or MAIN, found["file"])


def looks_like_hub(model: object) -> bool:
    """Whether a text that is a path here could also be a Hub id."""
    return isinstance(model, str) and _HUB.fullmatch(model) is not None


def short_name(model: str | os.PathLike[str]) -> str:
    """The name by which a model is shown and served: of its directory, of its GGUF file, or of its repository."""
    place = read_name(model)
    if isinstance(place, Path):
        return place.stem if place.suffix == ".gguf" else place.resolve().name
    return place.short if isinstance(place, HubName) else place.name


def printed(line: str) -> None:
    """Tells a line for people on stderr: what `say` does where nobody says otherwise."""
    print(line, file=sys.stderr, flush=True)


def weights_needed(preset: Preset) -> FileError:
    """The sentence about a preset where weights are needed."""
    return FileError(
        f"{preset.name} names shapes alone, for plan and compile: name weights of them, a directory, a GGUF file or a Hub id "
        f"(presets are {', '.join(PRESETS)})"
    )
