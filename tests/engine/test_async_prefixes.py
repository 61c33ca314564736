"""The prefix cache of an engine for many callers: it keeps by itself, settles when nobody is there, and survives a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ninfer_jax import AsyncEngine, Completion, Engine, EngineConfig, SamplingParams
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.engine.prefix_settings import open_prefixes
from ninfer_jax.engine.prefixes import NoPrefixes
from ninfer_jax.planning.kept import mode_of

pytestmark = pytest.mark.micro

IDS = np.random.default_rng(4).integers(10, 1000, 150).tolist()
GREEDY = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)


@pytest.fixture
def start(micro_drafting: Engine, tmp_path: Path) -> Iterator[Callable[[], KeptPrefixes]]:
    """Gives the engine what `AsyncEngine.open` would, over the same directory each time."""
    runner = micro_drafting.runner

    def begin() -> KeptPrefixes:
        config = EngineConfig(cache_bytes=1 << 24, cache_dir=tmp_path)
        runner.prefixes = kept = open_prefixes(runner.pool, config, mode_of(config, many=True), 1 << 24, lambda: {"weights": "w"})
        return kept

    yield begin
    runner.prefixes = NoPrefixes()
    assert runner.busy == 0 and runner.free_tokens == runner.pool_tokens and not runner.faults


def test_a_conversation_goes_on_from_what_was_settled_and_after_a_restart(micro_drafting, start, tmp_path) -> None:
    first = micro_drafting.generate(IDS, GREEDY)
    whole = [*IDS, *first.tokens, 5, 6]
    wanted = micro_drafting.generate(whole, SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True))
    kept = start()

    def answered(engine: AsyncEngine) -> Completion:
        return engine.generate(whole, SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True))

    with AsyncEngine(micro_drafting) as engine:
        assert engine.describe()["prefix_cache"] == "exact"
        assert engine.generate(IDS, GREEDY).tokens == first.tokens
        for _ in range(2000):  # idle time: the answer is prefilled, and all is written
            if engine.call(lambda e: kept.known(whole)).result() == 192 and len(list(tmp_path.glob("*.state"))) == 2:
                break
            time.sleep(0.01)
        second = answered(engine)
        assert (second.tokens, second.stats.cached_tokens) == (wanted.tokens, 192)
        assert engine.prefix_counters.hits_host == 1
        assert engine.load().cached_tokens == {"host": 192, "disk": 0}
    start()
    with AsyncEngine(micro_drafting) as engine:
        third = answered(engine)
        assert (third.tokens, third.stats.cached_tokens) == (wanted.tokens, 192)
        assert engine.prefix_counters.hits_disk == 1


def test_an_engine_for_many_is_exact_unless_it_is_told_otherwise() -> None:
    for given, many, mode in (
        ({}, True, "exact"),
        ({}, False, "off"),
        ({"cache_bytes": 1 << 20}, False, "exact"),
        ({"prefix_cache": "off"}, True, "off"),
        ({"prefix_cache": "fast"}, False, "fast"),
    ):
        assert mode_of(EngineConfig(**given), many) == mode
    with pytest.raises(ValueError, match=r"^prefix_cache is 'yes', known are auto, exact, fast, off$"):
        EngineConfig(prefix_cache="yes")
    with pytest.raises(ValueError, match=r"^cache_dir is given, but prefix_cache is 'off'"):
        EngineConfig(prefix_cache="off", cache_dir="x")
    with pytest.raises(ValueError, match=r"^cache_dir: the path is empty$"):
        EngineConfig(cache_dir="")


def test_a_waiting_request_does_not_wait_for_an_answer_that_is_being_settled(micro_engine: Engine) -> None:
    """One slot: settling gives it back at once."""
    runner = micro_engine.runner
    config = EngineConfig(prefix_cache="exact", cache_bytes=1 << 24)
    runner.prefixes = kept = open_prefixes(runner.pool, config, "exact", 1 << 24, dict)
    try:
        said = micro_engine.generate(IDS[:100], LONG).tokens
        whole = [*IDS[:100], *said]
        assert runner.idle() and runner.busy == 1
        assert micro_engine.generate([1, 2, 3], SamplingParams(temperature=0, max_new_tokens=3)).tokens
        assert kept.known(whole) == 64
        micro_engine.settle()
        assert kept.known(whole) == 192
    finally:
        kept.close(save=False)
        runner.prefixes = NoPrefixes()
    assert runner.busy == 0
