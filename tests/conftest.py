"""What all folders share: engines, made once a process, and how tests are put together for two of them.

Compiling an engine takes half a minute of one core whatever the size of its model, and next to nothing when JAX's
compilation cache has its programs: tests use the two standard engines wherever these will do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ninfer_jax import Engine

PLAIN = dict(context=512, prefill_chunk=64, kv="f32")
DRAFTING = PLAIN | dict(slots=2, draft=3)
# The same two kinds of a model without language.
MICRO = dict(context=256, prefill_chunk=64, kv="f32")
MICRO_DRAFTING = MICRO | dict(slots=2, draft=1)

# Fixtures that compile an engine -> the group of their tests. A group stays in one process, so that its engine is compiled
# once; the longest come first, so that no process ends long after the other.
ENGINES = {
    "together": "standard",
    "draft_engine": "standard",
    "plain_engine": "standard",
    "coarse_engine": "standard",
    "micro_engine": "micro",
    "micro_drafting": "micro",
}
LONGEST_FIRST = ("e8", "model", "standard", "micro")
# Folders of tests that are compiled as for users, like tests with one of these marks: what they are about is numbers or code.
AS_FOR_USERS = {"kernels", "cards", "evaluate"}
AS_FOR_USERS_MARKS = {"bits", "as_for_users"}


@contextmanager
def compiled(*, quickly: bool) -> Iterator[None]:
    """XLA without most of its optimisations inside, or with them: half the time to compile, answers that differ by rounding."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quickly)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def engine_for() -> Callable[..., Engine]:
    """(path of the model, None for the bundled one; `quickly`; fields of EngineConfig) -> an engine, the same one each time."""
    from ninfer_jax import Engine, EngineConfig
    from ninfer_jax.checkpoints import tiny_path

    @cache
    def loaded(path: Path, quickly: bool, config: EngineConfig) -> Engine:
        with compiled(quickly=quickly):
            return Engine.load(path, config)

    return lambda path=None, quickly=False, **fields: loaded(path or tiny_path(), quickly, EngineConfig(**fields))


@pytest.fixture(scope="session")
def plain_engine(engine_for) -> Engine:
    """The bundled model: one slot, no drafts, f32 pages, 512 tokens."""
    return engine_for(**PLAIN)


@pytest.fixture(scope="session")
def draft_engine(engine_for) -> Engine:
    """The bundled model: two slots, three drafts a round, f32 pages, 512 tokens."""
    return engine_for(**DRAFTING)


@pytest.fixture(scope="session")
def coarse_engine(engine_for) -> Engine:
    """The bundled model: one slot, no drafts, 4-bit pages, 512 tokens."""
    return engine_for(quickly=True, **PLAIN | dict(kv="rk4v4"))


@pytest.fixture(scope="session")
def random_tensors():
    """Canonical name -> float32 array: every tensor of `micro.CONFIG`."""
    import micro

    return micro.draw()


@pytest.fixture(scope="session")
def micro_path(tmp_path_factory, random_tensors) -> Path:
    """A checkpoint of `micro.CONFIG`, which no test may change."""
    import micro

    return micro.write(tmp_path_factory.mktemp("micro") / "model", random_tensors)


@pytest.fixture(scope="session")
def micro_engine(engine_for, micro_path) -> Engine:
    """Random weights: one slot, no drafts, f32 pages, 256 tokens."""
    return engine_for(micro_path, quickly=True, **MICRO)


@pytest.fixture(scope="session")
def micro_drafting(engine_for, micro_path) -> Engine:
    """Random weights: two slots, one draft a round, f32 pages, 256 tokens."""
    return engine_for(micro_path, quickly=True, **MICRO_DRAFTING)


def folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        engines = [name for name in ENGINES if name in getattr(item, "fixturenames", ())]
        if folder(item) == "cards":
            item.add_marker("cards")
        if engines:
            item.add_marker("engine")
        if not item.get_closest_marker("xdist_group"):
            # The folder of the model shares its programs, see `harness` there.
            own = "model" if "harness" in getattr(item, "fixturenames", ()) else item.path.stem
            item.add_marker(pytest.mark.xdist_group(ENGINES[engines[0]] if engines else own))
    order = {name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.get_closest_marker("xdist_group").args[0], len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    as_for_users = folder(item) in AS_FOR_USERS or any(map(item.get_closest_marker, AS_FOR_USERS_MARKS))
    with compiled(quickly=not as_for_users):
        return (yield)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A module's compiled functions go with it: together they took 6.5 GB of a process by the end."""
    if nextitem is None or nextitem.path != item.path:
        import jax

        jax.clear_caches()
        gc.collect()
