"""Configurations that fit, beside one that does not: the fewest changes of what was set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, combinations, islice, product
from typing import Any

from ninfer_jax.config import MAX_CONTEXT, EngineConfig, ModelConfig, Recipe
from ninfer_jax.planning.budget import Place
from ninfer_jax.planning.choose import OPEN, Asked, Choice, choose
from pallas_kernels.kv_formats import FORMATS

COUNT = 3
_TOGETHER = 3  # fields that are changed at once, at most
_RECIPES = ("w8", "q4-quality", "q4")
_CONTEXTS = tuple(MAX_CONTEXT * share // 8 for share in range(7, 0, -1)) + (16_384, 8192, 4096, 2048, 1024, 512, 256)


class DoesNotFit(ValueError):
    """A configuration that is larger than what is free; one line. changes: what to set instead, of each configuration that fits;
    "recipe" among the fields where weights may still be stored in another."""

    def __init__(self, message: str, changes: list[dict[str, Any]]):
        super().__init__(message)
        self.changes = changes


def nearest(
    model: ModelConfig,
    config: EngineConfig,
    place: Place,
    recipe: Recipe | Asked | None = None,
    *,
    drafts: bool = True,
    recipe_is_open: bool = False,
    need_less: int = 0,
) -> list[dict[str, Any]]:
    """Changes of what `config` sets that make it fit, at most `COUNT`: of one field first, then of two and three, the mildest of
    each; then further values of these.

    recipe_is_open: whether the weights may be stored otherwise. need_less: bytes that have to be free beyond what is planned."""
    place = place if place.free is None else dataclasses.replace(place, free=max(0, place.free - need_less))

    def fits(changes: Mapping[str, Any]) -> bool:
        fields = {name: value for name, value in changes.items() if name != "recipe"}
        stored = changes.get("recipe", recipe)
        try:
            choice = choose(model, dataclasses.replace(config, **fields), place, _called(stored), drafts)
        except ValueError:
            return False  # formats that do not go with the model, and the like
        return choice.fits

    fields = [(name, values) for name, values in _milder(model, config, recipe, recipe_is_open) if values]
    found: list[dict[str, Any]] = []
    further: list[Iterator[dict[str, Any]]] = []
    for number in range(1, _TOGETHER + 1):
        for group in combinations(fields, number):
            if any(change.keys() <= {name for name, _ in group} for change in found):
                continue  # less is enough
            fitting = _fitting(group, fits)
            found += islice(fitting, 1)
            further.append(fitting)
            if len(found) == COUNT:
                return found
    # Fewer ways than wanted: more steps along those that there are, and shorter contexts where none was asked for.
    shorter = (found[-1] | {"context": tokens} for tokens in _CONTEXTS if found and config.context is None)
    more = chain(chain.from_iterable(further), (changes for changes in shorter if fits(changes)))
    return [*found, *islice(more, COUNT - len(found))]


def refusal(choice: Choice, changes: list[dict[str, Any]], hint: str) -> DoesNotFit:
    """The exception for a choice that does not fit, with both byte counts; hint: what to do where no change helps."""
    fitting = "; ".join(", ".join(f"{name} {value}" for name, value in change.items()) for change in changes)
    return DoesNotFit(
        f"memory: {choice.budget.total:,} bytes are needed for weights, pages, states and workspace, "
        f"{choice.place.free or 0:,} are free on {choice.place.name}; " + (f"what fits: {fitting}" if fitting else hint),
        changes,
    )


def _called(recipe: Any) -> Any:
    from ninfer_jax.config import recipe as recipe_called

    return recipe_called(recipe) if isinstance(recipe, str) and recipe not in OPEN else recipe


def _milder(
    model: ModelConfig, config: EngineConfig, recipe: Recipe | Asked | None, recipe_is_open: bool
) -> Iterator[tuple[str, list[Any]]]:
    """Values that take less, of each field that is set, the mildest first."""
    if config.kv is not None:
        smaller = [name for name in FORMATS[FORMATS.index(config.kv) + 1 :] if name != "rk4v4"]  # as large as rk4v4-e8, and worse
        yield "kv", smaller
    if recipe_is_open and (recipe is None or isinstance(recipe, Recipe)):
        at = _RECIPES.index(recipe.name) + 1 if recipe is not None and recipe.name in _RECIPES else 0
        yield "recipe", list(_RECIPES[at:])
    if config.slots not in (None, 1):
        yield "slots", list(range(config.slots - 1, 0, -1))
    if config.pool is not None:
        least = config.context or min(MAX_CONTEXT, model.max_positions)
        yield "pool", [n for n in (config.pool * share // 8 // 64 * 64 for share in range(7, 0, -1)) if n >= least]
    if config.context is not None:
        yield "context", [n for n in _CONTEXTS if n < config.context]
    if config.draft:
        yield "draft", [0]


def _fitting(group: tuple[tuple[str, list[Any]], ...], fits: Callable[[Mapping[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Values of the group's fields that fit together, the mildest first; the last field gives way before the first does."""
    if not fits({name: values[-1] for name, values in group}):
        return  # the least of each
    for values in product(*(values for _, values in group)):
        changes = {name: value for (name, _), value in zip(group, values, strict=True)}
        if fits(changes):
            yield changes
