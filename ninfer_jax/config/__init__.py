"""Configuration of the model (read from a checkpoint) and of the engine (chosen by the user)."""

from ninfer_jax.config.engine import MAX_CONTEXT, MAX_DRAFT, MAX_SLOTS, PAGE, EngineConfig
from ninfer_jax.config.model import FULL, LINEAR, ModelConfig, config_notes
from ninfer_jax.config.presets import PRESETS, preset, preset_called
from ninfer_jax.config.recipe import RECIPES, Recipe, WeightFormat, recipe

__all__ = [
    "FULL",
    "LINEAR",
    "MAX_CONTEXT",
    "MAX_DRAFT",
    "MAX_SLOTS",
    "PAGE",
    "PRESETS",
    "RECIPES",
    "EngineConfig",
    "ModelConfig",
    "Recipe",
    "WeightFormat",
    "config_notes",
    "preset",
    "preset_called",
    "recipe",
]
