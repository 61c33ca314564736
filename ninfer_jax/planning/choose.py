"""A choice for whatever a configuration leaves open: the first of an ordered list that fits what is free on the device.

`choose` is the one function that does, for every command and for `Engine.load`. docs/defaults.md has the list in words, and
what it comes to on cards of several sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_jax.config import MAX_CONTEXT, PAGE, EngineConfig, ModelConfig, Recipe
from ninfer_jax.config import recipe as recipe_called
from ninfer_jax.config.engine import AUTO_FIELDS
from ninfer_jax.planning import sizes
from ninfer_jax.planning.budget import Budget, Place, budget
from ninfer_jax.planning.sizes import Shape
from pallas_kernels.kv_formats import check_format

# Tokens of a prefill call: of what the 27B's speed on a card is modelled with, and of what the bundled model's on two cores was
# measured with.
CHUNK_ON_CARD, CHUNK_ON_CPU = 1024, 512
DRAFT = 3  # 1.69 times plain decoding on a CPU (measured), and most of what is modelled for a card
# Left free on a card, for a window that somebody opens; on a CPU one part of so many, for compiling.
KEPT_FREE, KEPT_ON_CPU = 512 << 20, 8
POOL_STEP = 4096  # tokens by which a pool that all slots share is rounded down
Asked = Literal["auto", "codes"]
OPEN = ("auto", "codes")
_SHORTER = tuple(MAX_CONTEXT >> n for n in range(1, 7))  # contexts down to 4,096


@dataclass(frozen=True)
class Row:
    """One line of the list: recipe None is weights as they are; context None the whole of the model's own."""

    recipe: str | None
    kv: str
    slots: int = 1
    context: int | None = None
    draft: int = DRAFT
    chunk: int = CHUNK_ON_CARD


CARD_ROWS = (
    Row(None, "bf16", slots=4),
    Row(None, "bf16"),
    Row("w8", "bf16"),
    Row("q4-quality", "int8"),
    Row("q4", "rk4v4-e8"),
    *(Row("q4", "rk4v4-e8", context=tokens) for tokens in _SHORTER),
    *(Row("q4", "rk4v4-e8", context=tokens, draft=0) for tokens in _SHORTER),
    Row("q4", "rk4v4-e8", context=_SHORTER[-1], draft=0, chunk=256),
)
# Pages that lose something are not taken unasked where memory is seldom short and answers are compared with others'.
CPU_ROWS = (Row(None, "f32"), Row("w8", "f32"), Row("q4", "f32"), *(Row("q4", "f32", context=tokens) for tokens in _SHORTER))


@dataclass(frozen=True)
class Choice:
    """config: with nothing left open. recipe: of the weights, None as they are. chosen: fields that were open, "recipe" among
    them. fits: whether all of it is free on `place`; True where nothing tells. source: whose configuration it is where it was
    not chosen from the list, as a line."""

    config: EngineConfig
    recipe: Recipe | None
    budget: Budget
    place: Place
    chosen: tuple[str, ...]
    fits: bool
    source: str = ""

    def values(self) -> dict[str, Any]:
        """The chosen fields' values."""
        name = self.recipe.name if self.recipe else None
        return {field: name if field == "recipe" else getattr(self.config, field) for field in self.chosen}

    def line(self) -> str:
        """One line: what was chosen, and why; "" where nothing was open."""
        if not self.chosen:
            return ""
        words = ", ".join(f"{field} {_shown(value)}" for field, value in self.values().items())
        return f"auto: {words} ({self._why()})"

    def _why(self) -> str:
        if self.source:
            return self.source
        need, free = f"{self.budget.total / 2**30:.2f} GiB", self.place.free
        if free is None:
            return f"takes {need}; nothing tells what is free on {self.place.name}"
        where = f"{free / 2**30:.2f} GiB free on {self.place.name}"
        if not self.fits:
            return f"takes {need}, the least of the list, and there are {where}"
        return f"the first of the list in docs/defaults.md that fits: {need} of {where}"

    def json(self) -> dict[str, Any]:
        """The configuration, what of it was chosen, and why."""
        config = {field: getattr(self.config, field) for field in (*AUTO_FIELDS, "drafter", "dtype")}
        config["recipe"] = self.recipe.name if self.recipe else None
        return {"configuration": config, "chosen": list(self.chosen), "why": self._why()}


def _shown(value: object) -> str:
    return "as they are" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def choose(
    model: ModelConfig, config: EngineConfig, place: Place, recipe: Recipe | Asked | None = None, drafts: bool = True
) -> Choice:
    """`config` with what it leaves open chosen for a model and a device: what is set stays, whatever it takes.

    recipe: the weights' formats where they have some; "auto" for weights that may be stored in any, of which the choice then
    names one, "codes" for those that have to be, as another program's codes are. drafts: whether the checkpoint has the tensors of
    an MTP head. Where none of the list fits, the least of it comes back with `fits` False. ValueError for what does not go
    together.
    """
    drafts = drafts and model.mtp_layers > 0
    check(model, config, place.platform)
    open_fields = tuple(field for field in AUTO_FIELDS if getattr(config, field) is None)
    made: list[Choice] = []
    for filled, weights in candidates(model, config, place, recipe, drafts):
        made.append(choice := _made(model, filled, weights, place, open_fields, recipe in OPEN))
        if place.free is None or choice.budget.total <= place.free - kept_free(place):
            return choice
    # Rather a tight fit than none.
    return next((choice for choice in made if choice.fits), min(made, key=lambda choice: choice.budget.total))


def kept_free(place: Place) -> int:
    """Bytes of what is free that a choice leaves alone if it can."""
    if place.platform == "cpu":
        return (place.free or 0) // KEPT_ON_CPU
    return KEPT_FREE


def candidates(
    model: ModelConfig, config: EngineConfig, place: Place, recipe: Recipe | Asked | None, drafts: bool
) -> Iterator[tuple[EngineConfig, Recipe | None]]:
    """The list, with what is set in the place of what it says; nothing twice."""
    on_card, seen = place.platform != "cpu", set()
    whole = min(model.max_positions, MAX_CONTEXT)
    for row in CARD_ROWS if on_card else CPU_ROWS:
        if row.slots > 1 and config.slots is None and place.free is None:
            continue  # room for several whole contexts wants to be known
        if recipe in OPEN and row.recipe and model.tied_embeddings:
            continue  # no recipe has a format for a head that is the embedding
        if recipe == "codes" and not row.recipe and not model.tied_embeddings:
            continue
        if recipe in OPEN and row.recipe and not on_card and config.kernels == "xla":
            continue  # XLA's operations get weights expanded
        weights = recipe if isinstance(recipe, Recipe) or recipe is None else recipe_called(row.recipe) if row.recipe else None
        slots = row.slots if config.slots is None else config.slots
        context = config.context or min(whole, row.context or whole)
        filled = dataclasses.replace(
            config,
            context=context,
            slots=slots,
            draft=_draft(row, config, slots, on_card, drafts) if config.draft is None else config.draft,
            kv=config.kv or row.kv,
            prefill_chunk=config.prefill_chunk or (row.chunk if on_card else CHUNK_ON_CPU),
        )
        check_format(filled.kv or "", model.head_dim)
        for pool in _pools(model, filled, weights, place, asked=config.slots is not None) if config.pool is None else [config.pool]:
            pair = dataclasses.replace(filled, pool=pool), weights
            key = (pair[0], weights.name if weights else None)
            if key not in seen:
                seen.add(key)
                yield pair


def _draft(row: Row, config: EngineConfig, slots: int, on_card: bool, drafts: bool) -> int:
    if config.drafter == "none" or not (drafts or "lookup" in config.drafter):
        return 0
    if "lookup" in config.drafter:
        return DRAFT  # whoever asks for look-ups wants drafts
    if on_card:
        return row.draft
    # Measured on two cores: 1.69 times plain decoding in one slot, 0.85 times in four; XLA's own operations were not measured.
    return DRAFT if slots == 1 and config.kernels != "xla" else 0


def _pools(model: ModelConfig, config: EngineConfig, recipe: Recipe | None, place: Place, asked: bool) -> list[int]:
    """Tokens of the pool: every slot its whole context; where several slots are asked for, what fits of it, a context at least."""
    assert config.context and config.slots and config.kv
    whole = config.slots * -(-config.context // PAGE) * PAGE
    if config.slots == 1 or not asked or place.free is None:
        return [whole]
    least = -(-config.context // PAGE) * PAGE
    shape = shape_of(config, recipe, place.platform, least)
    left = place.free - kept_free(place) - budget(model, shape, place.platform).total
    more = left // sizes.page(model, config.kv, shape.mtp) * PAGE // POOL_STEP * POOL_STEP
    fitting = max(least, min(whole, least + more))
    return [whole] if fitting == whole else [whole, fitting]


def shape_of(config: EngineConfig, recipe: Recipe | None, platform: str, pool: int | None = None) -> Shape:
    """The shape of a configuration with nothing left open, its pool replaced by another where one is given."""
    assert config.context and config.slots and config.kv and config.prefill_chunk and config.draft is not None
    draft = 0 if config.drafter == "none" else config.draft
    tokens = -(-(pool or config.pool or config.slots * config.context) // PAGE) * PAGE
    dtype = ("bfloat16" if platform != "cpu" else "float32") if config.dtype == "auto" else config.dtype
    if platform == "cpu" and config.kernels == "xla":
        recipe = None  # XLA's operations get weights expanded
    return Shape(
        config.context,
        config.slots,
        draft,
        config.drafter if draft else "none",
        config.kv,
        tokens,
        config.prefill_chunk,
        dtype,
        recipe,
    )


def _made(
    model: ModelConfig, config: EngineConfig, recipe: Recipe | None, place: Place, open_fields: tuple[str, ...], recipe_open: bool
) -> Choice:
    found = budget(model, shape_of(config, recipe, place.platform), place.platform)
    chosen = tuple(f for f in open_fields if f != "pool" or config.slots != 1) + (("recipe",) if recipe_open else ())
    return Choice(config, recipe, found, place, chosen, place.free is None or found.total <= place.free)


def check(model: ModelConfig, config: EngineConfig, platform: str) -> None:
    """ValueError where configuration, model and platform do not go together, whatever is left open."""
    if config.context is not None and config.context > model.max_positions:
        raise ValueError(f"context is {config.context}, the model's max_position_embeddings is {model.max_positions}")
    if config.kv is not None:
        check_format(config.kv, model.head_dim)
    if config.mtp and not model.mtp_layers:
        raise ValueError(
            f"draft is {config.draft}, but by its config the model has no MTP head to draft with; use draft 0 or drafter 'lookup'"
        )
    if platform != "cpu" and config.kernels != "auto":
        raise ValueError(f"kernels is {config.kernels!r}, which is for a CPU; on a card it is 'auto'")
