"""MODEL made ready for an engine: found or fetched, and converted once where the device, or whoever asks, wants a recipe."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ninfer_jax.config import RECIPES, EngineConfig, ModelConfig
from ninfer_jax.config import recipe as recipe_called
from ninfer_jax.engine.allocator import gpu_wanted
from ninfer_jax.engine.convert_apart import convert_apart
from ninfer_jax.models import Found, HubName, Say, Tell, checked, hub, kept, printed
from ninfer_jax.models.places import found_in
from ninfer_jax.planning.budget import OUTSIDE, Place, card_here
from ninfer_jax.planning.choose import choose
from ninfer_jax.planning.known import known_of
from pallas_kernels.driver import card_memory

AS_IT_IS = "none"  # in the place of a recipe: no conversion
_STAGES = {"digests": "reading", "weights": "converting", "verify": "verifying"}


def on_a_card() -> bool:
    """Whether JAX will take a GPU: it is told so, and there are a driver and a plugin. Starts nothing."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return gpu_wanted(os.environ) and any(map(importlib.util.find_spec, plugins)) and card_memory() is not None


def default_recipe(found: Found | hub.Snapshot, config: EngineConfig) -> str | None:
    """The recipe for a checkpoint when nobody names one: None to run it as it is. On a card that of `choose`, as `plan` has it."""
    if isinstance(found, Found) and (found.artifact or found.bundled):
        return None
    if not on_a_card():
        return "q4" if found.quantised else None  # codes of another program's: nothing runs them as they are
    known = known_of(found.path if isinstance(found, Found) else found.source)
    return _card_recipe(known.model, known.drafts, found.quantised, config)


def _card_recipe(model: ModelConfig, drafts: bool, quantised: bool, config: EngineConfig) -> str | None:
    """The recipe that a card takes a checkpoint in; None for one that fits as it is."""
    place = card_here()
    if place is None:  # a card that this package has no name for
        free, total = card_memory() or (0, 0)
        place = Place("cuda", "the card", max(0, free - OUTSIDE), total)
    chosen = choose(model, config, place, "codes" if quantised else "auto", drafts).recipe
    return chosen.name if chosen else None


def prepared(
    model: str | os.PathLike[str],
    recipe: str | None = None,
    *,
    config: EngineConfig | None = None,
    say: Say | None = None,
    tell: Tell,
) -> Path:
    """The directory, a checkpoint or an artifact, that an engine loads for MODEL.

    recipe: to convert it by; None for what the device wants (`default_recipe`), "none" for none. config: of that engine. say: told
    what is fetched or converted before it is; None prints that to stderr. tell: called with (stage, done, in all). FileError and
    ValueError, one line, for a model that cannot be had; nothing half-made is ever returned."""
    say, config = say or printed, config or EngineConfig()
    tokenizer = config.tokenizer
    if recipe not in (None, AS_IT_IS):
        recipe_called(recipe)
    place = checked(model)
    if isinstance(place, HubName):
        before = hub.recorded(place)
        # The artifact does without the files that it was made of.
        if before is not None and (made := _made_before(model, before, recipe, config)) is not None:
            return made
        snapshot = hub.fetch(place, say, tell)
        found, identity = found_in(snapshot), snapshot.identity
    else:
        snapshot, found = None, place
        identity = {} if found.artifact else found.identity()
    name = _wanted(recipe, found, config)
    if found.artifact:
        if recipe not in (None, AS_IT_IS):
            raise ValueError(f"recipe {recipe}: {found.path} is an artifact, its weights have formats of their own; leave it out")
        return found.path
    if name is None:
        if found.quantised:
            raise ValueError(f"{found.path}: its weights are codes of another program's, which need a recipe to be run; name one")
        return found.path
    job = job_of(model, snapshot or found, name, tokenizer)
    if (made := kept.finished(job)) is not None:
        return made
    known_of(found.path)  # what is no model of this family should not wait for a conversion to be refused
    say(f"{job.model} is converted once, recipe {name}, into {job.place}")

    def run(folder: Path, lock: int) -> None:
        options = {"recipe": name, "tokenizer": tokenizer}
        convert_apart(found.path, folder, options, lambda stage, done, total: tell(_STAGES.get(stage, stage), done, total), lock)

    def same() -> bool:
        return snapshot.whole if snapshot is not None else found.identity() == identity

    return kept.make(job, run, same, say)


def _made_before(model: str | os.PathLike[str], before: hub.Snapshot, recipe: str | None, config: EngineConfig) -> Path | None:
    """The artifact that was made of a snapshot, whose own files may be gone, for this recipe or this device."""

    def made(name: str | None) -> Path | None:
        return kept.finished(job_of(model, before, name, config.tokenizer)) if name else None

    if recipe is not None or not on_a_card():
        return made(_wanted(recipe, before, config))
    there = {name: place for name in RECIPES if (place := made(name)) is not None}
    if not there:
        return None
    known = known_of(next(iter(there.values())))
    return there.get(_card_recipe(known.model, known.drafts, before.quantised, config) or AS_IT_IS)


def _wanted(recipe: str | None, found: Found | hub.Snapshot, config: EngineConfig) -> str | None:
    return default_recipe(found, config) if recipe is None else None if recipe == AS_IT_IS else recipe


def job_of(model: str | os.PathLike[str], found: Found | hub.Snapshot, recipe: str, tokenizer: str | None) -> kept.Wanted:
    """The conversion that MODEL, found here or fetched, needs for a recipe."""
    if isinstance(found, hub.Snapshot):
        return kept.Wanted(str(found.name), found.identity, recipe, {"tokenizer": tokenizer})
    return kept.Wanted(found.path.resolve().name, found.identity(), recipe, {"tokenizer": tokenizer})
