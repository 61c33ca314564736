"""A model's geometry, its weights' formats and whether it can draft, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.config import ModelConfig, Recipe, preset
from ninfer_jax.config import recipe as recipe_called
from ninfer_jax.files import FileError, read_object
from ninfer_jax.model_path import tiny_path
from ninfer_jax.models import Preset, Say, Tell, printed, shapes_in
from ninfer_jax.models.hub import quantised_config
from ninfer_jax.planning.choose import Asked

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Known:
    """place: where the headers are, or a preset. recipe: formats of the stored weights, None as a checkpoint has them. open: if
    they are still to be stored: those of a preset, and those of a checkpoint, which a card takes converted where need be.
    quantised: whether they are codes of another program's, which nothing runs as they are. drafts: whether there are tensors of
    an MTP head."""

    place: Path | Preset
    model: ModelConfig
    recipe: Recipe | None
    open: bool
    drafts: bool
    quantised: bool = False

    def asked(self, name: str | None, platform: str) -> Recipe | Asked | None:
        """The recipe for `choose`: the one of that name ("auto": any, "none": as they are), by default the weights' own, or any
        that the device wants. ValueError for weights that have formats of their own."""
        if name is None:
            wants = isinstance(self.place, Preset) or platform != "cpu"
            if self.open and wants:
                return "codes" if self.quantised else "auto"
            return recipe_called("q4") if self.quantised else self.recipe
        if not self.open and self.recipe is not None:
            raise ValueError(f"--recipe {name}: this is an artifact, its weights have formats of their own")
        if name in ("auto", "none"):
            return "auto" if name == "auto" else None
        return recipe_called(name)


def known_of(name: str | Path | Preset, say: Say = printed, tell: Tell = lambda stage, done, total: None) -> Known:
    """A preset, or any MODEL; of a Hub id only what is needed here is fetched. ValueError for what is none, and for files that are
    no model's."""
    place = name if isinstance(name, Preset) else shapes_in(str(name), say, tell)
    if isinstance(place, Preset):
        return Known(place, preset(place.name), None, True, True)
    model = geometry_of(place)
    if not is_plain(place):
        return Known(place, model, None, True, model.mtp_layers > 0, quantised=True)
    if (place / MANIFEST).is_file():
        recipe, drafts = _of_manifest(place / MANIFEST)
        return Known(place, model, recipe, False, drafts)
    is_tiny = place.resolve() == tiny_path().resolve()
    return Known(place, model, None, not is_tiny, _drafts(place, model))


def is_plain(place: Path) -> bool:
    """Whether the weights are numbers as they are, or an artifact's, and no codes of another program's."""
    return place.is_dir() and (place / "config.json").is_file() and not quantised_config(place)


def geometry_of(place: Path) -> ModelConfig:
    """The geometry that a directory or a GGUF file describes, whatever its weights are. ValueError for another model's."""
    if is_plain(place):
        return ModelConfig.from_hf(place)
    if place.is_dir() and (place / "config.json").is_file() and not any(place.glob("*.safetensors")):
        # Of the Hub, of which no weights are here yet.
        config = read_object(place / "config.json")
        inner = {k: v for k, v in config.get("text_config", {}).items() if k != "quantization_config"}
        plain = {k: v for k, v in config.items() if k != "quantization_config"}
        return ModelConfig.from_hf(plain | ({"text_config": inner} if inner else {}))
    from ninfer_jax.checkpoints.sources import open_source

    source = open_source(place)
    return ModelConfig.from_hf(source.config, source.tensors)


def _drafts(folder: Path, model: ModelConfig) -> bool:
    if not any(folder.glob("*.safetensors")):  # of the Hub, of which no weights are here yet
        return model.mtp_layers > 0
    from ninfer_jax.checkpoints.checkpoint import Checkpoint

    return Checkpoint.open(folder).has_mtp


def _of_manifest(file: Path) -> tuple[Recipe, bool]:
    """The recipe by which an artifact was made, with the formats of single parameters, and whether it has an MTP head."""
    content: Any = read_object(file)
    try:
        parameters = content["parameters"]
        own = {n: (p["role"], int(p["group_size"])) for n, p in parameters.items() if p["kind"] == "matrix"}
        recipe = Recipe.from_json(content["recipe"]).with_groups(own)
        return recipe, any(p["group"] == "mtp" for p in parameters.values())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{file} is damaged: {type(error).__name__} {error}") from None
