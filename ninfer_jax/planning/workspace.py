"""The part of memory that only a compiler can tell, before one is asked: recorded where it has been, else a bound.

`recorded.json` has what XLA's compiler said of configurations of the 27B for a card (`benchmarks/record_workspace.py`).
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ninfer_jax.config import PRESETS, RECIPES, ModelConfig
from ninfer_jax.planning.sizes import ITEM, Shape

RECORDED, MODELLED = "recorded", "modelled"
EXECUTABLES = 64 << 20  # 31 MB for the 27B, compiled
# What small programs need whatever the model: the largest that was seen is 2 MB (the bundled model on a CPU, compiled).
_LEAST = 8 << 20
# Copies of a row's logits that a draw holds: scores, their order, what is masked, noise. Seven in the rounds that were compiled.
_LOGITS = 10


@dataclass(frozen=True)
class Workspace:
    """bytes: of the program that takes most beside weights and state. executables: bytes of all programs' code. how: "recorded" or
    "modelled"; note: of what, or by which rule."""

    bytes: int
    executables: int
    how: str
    note: str


def workspace(model: ModelConfig, shape: Shape, platform: str) -> Workspace:
    """The recorded figures of a configuration, else a bound for them."""
    row = recorded(model, shape) if platform != "cpu" else None
    if row is not None:
        note = f"compiled for {row['target']} with jax {row['jax']}"
        return Workspace(max(row["workspace"].values()), row["executables"], RECORDED, note)
    note = "a bound: the widest rows of a prefill call, or all logits of a round"
    return Workspace(bound(model, shape, platform), 0 if platform == "cpu" else EXECUTABLES, MODELLED, note)


def bound(model: ModelConfig, shape: Shape, platform: str) -> int:
    """Bytes that no program's temporaries exceed: of a prefill call the two widest float32 intermediates and four hidden rows, and
    on a CPU what attention and expanded weights take beside them; of a round the logits of all rows, several times."""
    query, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim
    values = model.gdn_value_heads * model.gdn_value_dim
    widest = max(2 * model.intermediate_size, 2 * (model.conv_channels + values), 2 * (2 * query + 2 * keys))
    prefill = 4 * shape.prefill_chunk * (widest + 4 * model.hidden_size)
    if platform == "cpu":
        scores = 4 * shape.prefill_chunk * model.query_heads * 1024
        expanded = 0 if shape.recipe is None else 4 * model.hidden_size * max(widest, 4096)
        prefill = 2 * prefill + scores + expanded
    rows = shape.slots * (shape.draft + 1)
    draws = 4 * model.vocab_size * rows * _LOGITS
    # A sequence's own tokens, compared place by place, and as they come back with its state.
    tokens = 4 * shape.context * (1 + (8 * shape.slots if shape.lookup else 0))
    activations = rows * ITEM[shape.dtype] * 4 * widest
    return max(prefill, draws + activations) + tokens + _LEAST


def recorded(model: ModelConfig, shape: Shape) -> Mapping[str, Any] | None:
    """The row that was recorded for a configuration, or for more tokens of the same."""
    fields = asdict(shape) | {"recipe": shape.recipe.name if shape.recipe else None}
    known = shape.recipe is None or RECIPES.get(shape.recipe.name) == shape.recipe
    same = ("kv", "draft", "drafter", "slots", "prefill_chunk", "recipe")
    for row in table() if known and shape.dtype == "bfloat16" else ():
        as_large = row["context"] >= shape.context and row["pool"] >= shape.pool
        if as_large and PRESETS.get(row["model"]) == model and all(row[key] == fields[key] for key in same):
            return row
    return None


@functools.cache
def table() -> tuple[Mapping[str, Any], ...]:
    """All that was recorded."""
    return tuple(json.loads((importlib.resources.files("ninfer_jax.planning") / "recorded.json").read_text("utf-8")))
