"""What is known of a model before anything of it is read but headers: its geometry, its weights' formats, whether it can draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ninfer_jax.config import PRESETS, ModelConfig, Recipe, preset
from ninfer_jax.files import FileError, read_object
from ninfer_jax.model_path import model_path

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Known:
    """recipe: formats of the stored weights, None as a checkpoint has them; open: whether they may still be stored otherwise, as
    those of a preset may, which has none. drafts: whether there are tensors of an MTP head."""

    model: ModelConfig
    recipe: Recipe | None
    open: bool
    drafts: bool

    def asked(self, name: str | None) -> Recipe | Literal["auto"] | None:
        """The recipe for `choose`: the one of that name ("auto": any, "none": as they are), by default the weights' own.
        ValueError for weights that have formats of their own."""
        if name is None:
            return "auto" if self.open else self.recipe
        if self.recipe is not None:
            raise ValueError(f"--recipe {name}: this is an artifact, its weights have formats of their own")
        if name in ("auto", "none"):
            return "auto" if name == "auto" else None
        from ninfer_jax.config import recipe

        return recipe(name)


def known_of(name: str | Path) -> Known:
    """A preset or a model directory. ValueError for neither, and for a directory whose files are no model's."""
    if str(name) in PRESETS:
        return Known(preset(str(name)), None, True, True)
    try:
        path = model_path(name)
    except FileError as error:
        raise ValueError(f"{error}; presets: {', '.join(PRESETS)}") from None
    model = ModelConfig.from_hf(path)
    if (path / MANIFEST).is_file():
        recipe, drafts = _of_manifest(path / MANIFEST)
        return Known(model, recipe, False, drafts)
    from ninfer_jax.checkpoints.checkpoint import Checkpoint

    return Known(model, None, False, Checkpoint.open(path).has_mtp)


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
