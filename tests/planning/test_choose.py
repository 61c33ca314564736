"""What is left open: the first of the list that fits, what is set as it was set, and the same for every door."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from ninfer_jax.config import EngineConfig, ModelConfig, preset, recipe
from ninfer_jax.planning.budget import Place, card
from ninfer_jax.planning.choose import choose
from ninfer_jax.planning.known import known_of

BIG = preset("qwen3_8_27b")
SMALL = known_of("tiny").model
GIB = 1 << 30


def on_card(
    free: float, config: EngineConfig | None = None, weights: object = "auto", model: ModelConfig = BIG, drafts: bool = True
):
    return choose(model, config or EngineConfig(), Place("cuda", "a card", int(free * GIB)), weights, drafts)


def words(choice) -> tuple:
    config = choice.config
    return choice.recipe and choice.recipe.name, config.kv, config.slots, config.context, config.draft, config.prefill_chunk


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_the_27b_on_a_card_of_24_gb(taken: int) -> None:
    choice = choose(BIG, EngineConfig(), card("rtx4090", taken << 30), "auto")
    assert choice.fits and words(choice) == ("q4", "rk4v4-e8", 1, 262_144, 3, 1024)


def test_more_room_is_never_used_for_less() -> None:
    """From GiB to GiB the list is gone up, from the shortest context to weights as they are in four slots."""
    found = [on_card(free) for free in (13, 14.2, 15, 16, 18, 20, 23, 28, 36, 45, 60, 75, 110, 140)]
    assert [choice.fits for choice in found] == [False] + [True] * 13
    contexts = [choice.config.context for choice in found]
    assert contexts == sorted(contexts) and contexts[0] == 4096 and contexts[-1] == 262_144
    order = ["q4", "q4-quality", "w8", None]
    recipes = [order.index(words(choice)[0]) for choice in found]
    assert recipes == sorted(recipes) and set(recipes) == {0, 1, 2, 3}
    assert words(found[-1]) == (None, "bf16", 4, 262_144, 3, 1024) and found[-1].config.pool == 4 * 262_144


def test_nothing_is_chosen_that_is_larger_than_what_is_free() -> None:
    """And half a GiB is left, unless only a tight fit is left."""
    for free in range(13, 150, 3):
        choice = on_card(free)
        assert choice.fits == (choice.budget.total <= free * GIB)
        if free > 16:
            assert choice.budget.total <= (free - 0.5) * GIB


SET = {"context": 5000, "kv": "int8", "draft": 2, "slots": 3, "pool": 6400, "prefill_chunk": 192}


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("number", [1, 2, 6])
def test_what_is_set_is_never_changed(platform: str, number: int) -> None:
    """Whatever is free, too: what does not fit says so and stays."""
    for fields in itertools.combinations(SET, number):
        given = {name: SET[name] for name in fields}
        for free in (0, (16 if platform == "cuda" else 96) * GIB, None):
            choice = choose(BIG, EngineConfig(**given), Place(platform, "x", free), recipe("q4"))
            assert {name: getattr(choice.config, name) for name in fields} == given
            assert not set(fields) & set(choice.chosen) and choice.recipe == recipe("q4") and "recipe" not in choice.chosen
            assert all(getattr(choice.config, name) is not None for name in SET)
            assert choice.fits == (free != 0)
    assert choose(BIG, EngineConfig(**SET), Place(platform, "x", 0)).line() == ""


def test_slots_that_were_asked_for_share_what_is_left() -> None:
    choice = on_card(23.1, EngineConfig(slots=4))
    assert words(choice)[:4] == ("q4", "rk4v4-e8", 4, 262_144) and choice.config.pool % 4096 == 0
    assert 262_144 < choice.config.pool < 4 * 262_144
    more = dataclasses.replace(choice.config, pool=choice.config.pool + 4096)
    for pool, left in ((choice.config, True), (more, False)):
        assert (choose(BIG, pool, choice.place, recipe("q4")).budget.total <= 22.6 * GIB) == left


def test_a_cpu_runs_what_is_fastest_and_loses_nothing() -> None:
    """Drafts pay in one slot and not in several; XLA's own operations were not measured."""
    place = Place("cpu", "cpu", 20 * GIB)
    assert words(choose(SMALL, EngineConfig(), place)) == (None, "f32", 1, 262_144, 3, 512)
    assert choose(SMALL, EngineConfig(slots=4), place).config.draft == 0
    assert choose(SMALL, EngineConfig(kernels="xla"), place).config.draft == 0
    assert choose(SMALL, EngineConfig(slots=4, drafter="lookup"), place).config.draft == 3
    assert words(choose(BIG, EngineConfig(), Place("cpu", "cpu", 48 * GIB), "auto"))[:2] == ("q4", "f32")
    assert words(choose(BIG, EngineConfig(kernels="xla"), Place("cpu", "cpu", 48 * GIB), "auto"))[0] is None


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_nobody_drafts_who_cannot(platform: str) -> None:
    place = Place(platform, "x", 16 * GIB)
    headless = dataclasses.replace(SMALL, mtp_layers=0)
    assert choose(headless, EngineConfig(), place).config.draft == 0
    assert choose(SMALL, EngineConfig(), place, drafts=False).config.draft == 0
    assert choose(SMALL, EngineConfig(drafter="none"), place).config.draft == 0
    assert choose(headless, EngineConfig(drafter="lookup"), place).config.draft == 3
    with pytest.raises(ValueError, match="draft is 2, but by its config the model has no MTP head"):
        choose(headless, EngineConfig(draft=2), place)


def test_a_head_that_is_the_embedding_takes_no_recipe() -> None:
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert on_card(0.01, model=tied).recipe is None and on_card(8, model=tied).recipe is None


def test_the_one_line_says_what_and_why() -> None:
    line = on_card(20, EngineConfig(context=8192, draft=0)).line()
    assert line.startswith("auto: kv bf16, slots 1, prefill_chunk 1,024, recipe q4-quality (") or "recipe q4" in line
    assert "the first of the list in docs/defaults.md that fits" in line and "of 20.00 GiB free on a card)" in line
    assert "takes 14.04 GiB, the least of the list, and there are 5.00 GiB free on a card" in on_card(5).line()
    told = json.loads(json.dumps(on_card(23).json()))
    assert told["configuration"]["recipe"] == "q4"
    assert told["chosen"] == ["context", "kv", "draft", "slots", "prefill_chunk", "recipe"]
    assert told["why"] in on_card(23).line()


def test_where_nothing_tells_one_slot_and_the_best_pages() -> None:
    choice = choose(BIG, EngineConfig(), Place("cuda", "cuda", None), recipe("q4"))
    assert choice.fits and words(choice) == ("q4", "bf16", 1, 262_144, 3, 1024) and "nothing tells" in choice.line()
