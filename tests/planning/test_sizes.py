"""The arithmetic of the quick plan is the engine's own array shapes: byte by byte, role by role."""

from __future__ import annotations

import dataclasses
import itertools

import micro
import pytest

from ninfer_jax.config import EngineConfig, ModelConfig, Recipe, WeightFormat, preset, recipe
from ninfer_jax.planning import sizes
from ninfer_jax.planning.sizes import Shape
from ninfer_jax.programs.plan import make_plan
from ninfer_jax.programs.setup import resolve
from pallas_kernels.kv_codecs import FORMATS

TINY = ModelConfig.from_hf(micro.CONFIG)
WIDE = dataclasses.replace(
    TINY, hidden_size=192, intermediate_size=328, gdn_value_heads=3, kv_heads=2, query_heads=4, vocab_size=1001
)
OWN = {"layers.1.mlp.down_proj": WeightFormat(4, 128), "mtp.layers.0.self_attn.o_proj": WeightFormat(4, 32)}
RECIPES = {
    "plain": None,
    "q4": recipe("q4"),
    "w8": recipe("w8"),
    "own": dataclasses.replace(recipe("q4"), overrides=OWN, draft_head=300),
}


def compare(model: ModelConfig, wanted: Recipe | None, platform: str = "cuda", **fields: object) -> None:
    given = {"context": 500, "slots": 1, "draft": 3, "kv": "bf16", "prefill_chunk": 64} | fields
    setup = resolve(model, 900, EngineConfig(**given), platform, wanted)
    made, shape = make_plan(setup, "rtx4090", 1), setup.shape
    dtype = str(shape.dtype)
    found = Shape(
        shape.context, shape.slots, shape.draft, shape.drafter, shape.kv, shape.pool_tokens, setup.chunk, dtype, setup.recipe
    )
    assert sizes.weights(model, found) == dict(made.weights)
    assert sizes.pages(model, found) == made.kv and sizes.page(model, found.kv, found.mtp) == made.page
    assert sizes.state(model, found) == made.state
    assert sizes.staging(model, found) == made.staging


@pytest.mark.parametrize("wanted", RECIPES)
@pytest.mark.parametrize("model", [TINY, WIDE], ids=["micro", "wide"])
def test_weights_in_every_recipe(model: ModelConfig, wanted: str) -> None:
    for draft in (0, 3):
        compare(model, RECIPES[wanted], draft=draft)
    if wanted == "plain":
        compare(dataclasses.replace(model, tied_embeddings=True, mtp_layers=0), None, draft=0)
        compare(model, None, "cpu", kv="f32")


@pytest.mark.parametrize("kv", FORMATS)
def test_pages_of_every_format(kv: str) -> None:
    for context, pool in ((64, None), (65, 200), (512, 64)):
        compare(WIDE, None, kv=kv, context=context, pool=pool)


def test_states_of_every_shape() -> None:
    for slots, draft, drafter in itertools.product((1, 3), (0, 1, 5), ("mtp", "lookup", "mtp+lookup", "none")):
        if draft or "lookup" not in drafter:
            compare(WIDE, None, slots=slots, draft=draft, drafter=drafter)


@pytest.mark.parametrize("wanted", ["q4", "q4-quality", "w8"])
def test_the_27b(wanted: str) -> None:
    compare(preset("qwen3_8_27b"), recipe(wanted), context=262_144, kv="rk4v4-e8", prefill_chunk=1024)
