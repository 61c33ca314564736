"""Recipes: in which format the weights of each role are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WeightFormat:
    """Codes of `bits` with a scale per `group` inputs. activations: `int8` rounds a prefill chunk's activations to
    8 bits, which tensor cores multiply twice as fast; `bf16` keeps them. Decode steps always keep them."""

    bits: int
    group: int
    activations: str = "int8"

    @property
    def words(self) -> str:
        return f"{self.bits} bits, groups of {self.group}, activations {self.activations}"


@dataclass(frozen=True)
class Recipe:
    """A format per role (attention, gdn, gdn_gate, mlp, mtp, head, embed); convolutions and norms are never quantised.

    overrides: formats of single projections, by name ("layers.3.mlp.down_proj"), where a checkpoint's own codes were kept.
    draft_head: rows of the reduced head that drafts choose from, 0 for the whole head.
    """

    name: str
    formats: Mapping[str, WeightFormat]
    overrides: Mapping[str, WeightFormat] = dataclasses.field(default_factory=dict)
    draft_head: int = 0

    def with_groups(self, groups: Mapping[str, tuple[str, int]]) -> Recipe:
        """The same, but with other groups for single projections: name -> (role, group)."""
        changed = {name: dataclasses.replace(self.formats[role], group=group) for name, (role, group) in groups.items()}
        return dataclasses.replace(self, overrides={n: f for n, f in changed.items() if f != self.formats[groups[n][0]]})

    def as_json(self) -> dict[str, Any]:
        """Name and formats; the overrides are each parameter's own business there."""
        formats = {role: dataclasses.asdict(f) for role, f in self.formats.items()}
        return {"name": self.name, "formats": formats, "draft_head": self.draft_head}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that `as_json` wrote; KeyError or TypeError for anything else."""
        formats = {role: WeightFormat(**f) for role, f in content["formats"].items()}
        return cls(content["name"], formats, draft_head=content["draft_head"])


# 8 bits in groups of 128 are still 20 dB and more closer to the weights than 4 bits in groups of 64 (docs/artifact.md).
_W4, _W8, _ROWS8 = WeightFormat(4, 64), WeightFormat(8, 128), WeightFormat(8, 32)
# Decay and write strength steer a state over the whole context, and the head decides near ties: both keep their inputs.
_FINE = WeightFormat(8, 128, "bf16")
RECIPES = {
    "q4": Recipe("q4", {"attention": _W4, "gdn": _W4, "mlp": _W4, "embed": _W4, "gdn_gate": _FINE, "head": _FINE, "mtp": _W8}),
    "w8": Recipe("w8", {"attention": _W8, "gdn": _W8, "mlp": _W8, "embed": _ROWS8, "gdn_gate": _FINE, "head": _FINE, "mtp": _W8}),
}

# Of the roles that q4 has in 4 bits, the two whose 8 bits take away most divergence for the bytes that they add on the 27B,
# and with which its whole context still fits the card (docs/quality.md).
_FINER = ("gdn", "embed")
RECIPES["q4-quality"] = Recipe("q4-quality", {**RECIPES["q4"].formats, **{role: RECIPES["w8"].formats[role] for role in _FINER}})


def recipe(name: str) -> Recipe:
    """The recipe of that name; ValueError lists the known ones."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; known recipes: {', '.join(RECIPES)}")
    return RECIPES[name]
