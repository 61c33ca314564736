"""Recipes: in which format the weights of each role are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """Codes of `bits` with a bf16 scale per `group` inputs. activations: `int8` rounds a prefill chunk's activations to
    8 bits, which tensor cores multiply twice as fast; `bf16` keeps them. Decode steps always keep them."""

    bits: int
    group: int
    activations: str = "int8"


@dataclass(frozen=True)
class Recipe:
    """A format per role (attention, gdn, gdn_gate, mlp, mtp, head, embed); convolutions and norms are never quantised."""

    name: str
    formats: Mapping[str, WeightFormat]


_W4, _W8 = WeightFormat(4, 64), WeightFormat(8, 32)
# Decay and write strength steer a state over the whole context, and the head decides near ties: both keep their inputs.
_GATES, _HEAD = WeightFormat(8, 32, "bf16"), WeightFormat(8, 32, "bf16")
RECIPES = {
    "q4": Recipe(
        "q4", {"attention": _W4, "gdn": _W4, "mlp": _W4, "embed": _W4, "gdn_gate": _GATES, "head": _HEAD, "mtp": _W8}
    ),
    "w8": Recipe(
        "w8", {"attention": _W8, "gdn": _W8, "mlp": _W8, "embed": _W8, "gdn_gate": _GATES, "head": _HEAD, "mtp": _W8}
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name; ValueError lists the known ones."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; known recipes: {', '.join(RECIPES)}")
    return RECIPES[name]
