"""Everything that fixes an engine's programs, from a model directory or a preset: to plan, compile and load by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.config import PRESETS, EngineConfig, ModelConfig, Recipe, preset
from ninfer_jax.config.presets import NAMED_IDS
from ninfer_jax.model import TextModel
from ninfer_jax.programs.programs import Programs
from ninfer_jax.state import StateShape, state_shape
from ninfer_jax.text import Tokenizer
from pallas_kernels.kv_codecs import check_format


@dataclasses.dataclass(frozen=True)
class Setup:
    """model, the state's shape, tokens of a prefill chunk, ids that the tokenizer names, "cpu" or "cuda", and the weights'
    recipe (None: in the dtype of the activations)."""

    model: ModelConfig
    shape: StateShape
    chunk: int
    valid_ids: int
    platform: str
    recipe: Recipe | None

    def text_model(self) -> TextModel:
        return TextModel(self.model, self.shape.dtype, mtp=self.shape.draft > 0, recipe=self.recipe)

    def programs(self) -> Programs:
        return Programs(self.text_model(), self.shape, self.chunk, self.valid_ids, self.platform)

    def digest(self, programs: Programs) -> str:
        """sha256 of all this and of the layout of weights and state: equal digests mean interchangeable executables."""
        _, arguments, _ = programs.source("decode_round")
        facts = {
            "model": dataclasses.asdict(self.model),
            "shape": {**self.shape._asdict(), "dtype": str(jnp.dtype(self.shape.dtype))},
            "chunk": self.chunk,
            "valid_ids": self.valid_ids,
            "platform": self.platform,
            "layout": [[str(x.dtype), list(x.shape)] for x in jax.tree.leaves(arguments)],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def resolve(model: ModelConfig, valid_ids: int, engine: EngineConfig, platform: str, recipe: Recipe | None = None) -> Setup:
    """The setup of an engine; ValueError where configuration and model do not go together."""
    on_card = platform != "cpu"
    dtype = jnp.dtype(("bfloat16" if on_card else "float32") if engine.dtype == "auto" else engine.dtype)
    kv = check_format(engine.kv or ("bf16" if on_card else "f32"), model.head_dim)
    if engine.draft and not model.mtp_layers:
        raise ValueError(f"draft is {engine.draft}, but by its config the model has no MTP head to draft with; use draft 0")
    return Setup(
        model, state_shape(model, engine, kv, dtype, rows_together=on_card), engine.prefill_chunk, valid_ids, platform, recipe
    )


def model_of(name: str) -> tuple[ModelConfig, int]:
    """Geometry and the number of ids that its tokenizer names, of a preset or of a model directory. ValueError for neither."""
    if name in PRESETS:
        return preset(name), NAMED_IDS
    path = tiny_path() if name == "tiny" and not Path(name).exists() else Path(name)
    if not path.is_dir():
        raise ValueError(f"{name} is neither a directory nor a preset; presets: {', '.join(PRESETS)}, and tiny")
    return ModelConfig.from_hf(path), Tokenizer.from_dir(path).vocab_size
