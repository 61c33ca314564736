"""Everything that fixes an engine's programs, from a model directory or a preset: to plan, compile and load by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ninfer_jax.checkpoints.sources import open_source
from ninfer_jax.config import EngineConfig, ModelConfig, Recipe, preset
from ninfer_jax.config.presets import NAMED_IDS
from ninfer_jax.model import TextModel
from ninfer_jax.models import Preset, shapes_in
from ninfer_jax.planning.budget import Place
from ninfer_jax.planning.choose import choose
from ninfer_jax.planning.known import geometry_of
from ninfer_jax.programs.programs import Programs
from ninfer_jax.state import StateShape, state_shape
from ninfer_jax.text import Tokenizer
from ninfer_jax.text.source_text import tokenizer_in
from pallas_kernels import cpu


@dataclasses.dataclass(frozen=True)
class Setup:
    """model, the state's shape, tokens of a prefill chunk, ids that the tokenizer names, "cpu" or "cuda", the weights' recipe
    (None: in the dtype of the activations, expanded at load where they are stored otherwise), and whose kernels a CPU runs
    ("cpu": LLVM's, "xla": none; a card has its own)."""

    model: ModelConfig
    shape: StateShape
    chunk: int
    valid_ids: int
    platform: str
    recipe: Recipe | None
    kernels: str = "xla"

    def text_model(self) -> TextModel:
        return TextModel(self.model, self.shape.dtype, mtp=self.shape.mtp, recipe=self.recipe)

    def programs(self) -> Programs:
        return Programs(
            self.text_model(), self.shape, self.chunk, self.valid_ids, self.platform, "cpu" if self.kernels == "cpu" else None
        )

    def configuration(self, programs: Programs) -> dict[str, Any]:
        """All of this by the names that a user knows, as JSON: equal ones, of equal code, have interchangeable executables."""
        shape, model = self.shape, dataclasses.asdict(self.model)
        del model["max_positions"]  # bounds a context and is in no program
        model |= {"layers": len(model.pop("layer_types")), "attention_layers": self.model.attention_layers}
        _, (parameters, state), _ = programs.source("decode_round")
        leaves = [*zip(programs.names(), parameters, strict=True), *(("", leaf) for leaf in jax.tree.leaves(state))]
        layout = [[name, str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves]
        facts = {
            "context": shape.context,
            "slots": shape.slots,
            "draft": shape.draft,
            "drafter": shape.drafter,
            "kv": shape.kv,
            "pool": shape.pool_tokens,
            "prefill_chunk": self.chunk,
            "dtype": str(jnp.dtype(shape.dtype)),
            **({"kernels": self.kernels} if self.platform == "cpu" else {}),
            "token_ids": self.valid_ids,
            "model": model,
            "weights": self._formats(set(programs.roles())),
            "layout": hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16],
        }
        return json.loads(json.dumps(facts))  # as it is read from a file: lists, no tuples

    def _formats(self, roles: set[str]) -> dict[str, str]:
        plain, recipe = str(jnp.dtype(self.shape.dtype)), self.recipe
        if recipe is None:
            return dict.fromkeys(sorted(roles), plain)
        found = {role: recipe.formats[role].words if role in recipe.formats else plain for role in sorted(roles)}
        return found | {name: format.words for name, format in sorted(recipe.overrides.items())}


def resolve(model: ModelConfig, valid_ids: int, engine: EngineConfig, platform: str, recipe: Recipe | None = None) -> Setup:
    """The setup of an engine. ValueError where configuration and model do not go together. What `engine` leaves open is chosen as
    for a device of which nothing tells what is free; who knows more asks `planning.choose` before.

    recipe: the formats in which weights are stored. They are used so by a card and by a CPU's own kernels; XLA's operations
    have nothing to read them with, and get them expanded."""
    on_card = platform != "cpu"
    engine = choose(model, engine, Place(platform, platform, None), recipe).config
    dtype = jnp.dtype(("bfloat16" if on_card else "float32") if engine.dtype == "auto" else engine.dtype)
    assert engine.kv and engine.prefill_chunk  # chosen, if not given
    kernels = "xla" if on_card or engine.kernels == "xla" else "cpu"
    if kernels == "cpu":
        try:
            cpu.check()
        except cpu.KernelError as error:
            raise ValueError(f"kernels: {error}") from None
    if recipe is not None and on_card and dtype != jnp.bfloat16:
        raise ValueError(f"dtype is {dtype.name}: weights of 4 and 8 bits need bfloat16 on a card")
    if not on_card and kernels == "xla":
        recipe = None
    shape = state_shape(model, engine, engine.kv, dtype)
    return Setup(model, shape, engine.prefill_chunk, valid_ids, platform, recipe, kernels)


def model_of(name: str | Path | Preset, tokenizer: str | None = "auto") -> tuple[ModelConfig, int]:
    """Geometry and the number of token ids of a model, by its name or by what `shapes_in` found. tokenizer: "auto" counts the ids
    that the tokenizer names, None the rows of the output head. ValueError for neither a preset nor a model."""
    place = shapes_in(name) if isinstance(name, str) else name
    ids = None
    if isinstance(place, Preset):
        model, ids = preset(place.name), NAMED_IDS
    elif place.is_file() or not (any(place.glob("*.safetensors")) or (place / "config.json").is_file()):
        model = geometry_of(place)
        ids = None if tokenizer is None else tokenizer_in(open_source(place)).vocab_size
    else:
        model = geometry_of(place)
        ids = None if tokenizer is None else Tokenizer.from_dir(place).vocab_size
    return model, model.vocab_size if tokenizer is None or ids is None else ids
