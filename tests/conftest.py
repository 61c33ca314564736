"""What all folders share: engines, made once a process, and how tests are put together for two of them.

Compiling an engine takes half a minute of one core whatever the size of its model, and next to nothing when JAX's
compilation cache has its programs: tests use the two standard engines wherever these will do.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ninfer_jax import Engine

# Tests write nothing into the home of who runs them, nor does what they start; JAX's cache keeps their programs.
os.environ["NINFER_JAX_PROGRAM_CACHE"] = "off"

PLAIN = dict(context=512, prefill_chunk=64, kv="f32", slots=1, draft=0)
DRAFTING = PLAIN | dict(slots=2, draft=3)
# The same two kinds of a model without language.
MICRO = dict(context=256, prefill_chunk=64, kv="f32", slots=1, draft=0)
MICRO_DRAFTING = MICRO | dict(slots=2, draft=1)

# Files and folders whose tests share what has been compiled -> one group, which stays in one process. The longest come first,
# so that no process ends long after the other; after these, every other file is a group of its own.
GROUPS = {
    "e8": ("engine/test_speculative.py",),
    "model": ("model",),
    "standard": (
        "engine/test_api.py",
        "engine/test_bad_input.py",
        "engine/test_cli.py",
        "engine/test_compilations.py",
        "engine/test_examples.py",
        "engine/test_grammars.py",
        "engine/test_greedy_drafts.py",
        "engine/test_look_ahead.py",
        "engine/test_pending_rows.py",
        "engine/test_scoring.py",
        "engine/test_short_prompts.py",
        "engine/test_streams.py",
        "evaluate",
        "bench/test_bench_cli.py",
        "bench/test_bench_measure.py",
        "programs/test_smoke.py",
    ),
    "benchmarks": ("benchmarks/test_device_check.py",),
    "micro": (
        "engine/test_async_engine.py",
        "engine/test_async_faults.py",
        "engine/test_async_prefixes.py",
        "engine/test_cpu_kernels.py",
        "engine/test_drafters.py",
        "engine/test_huge_pages.py",
        "engine/test_interrupts.py",
        "engine/test_kept_prefixes.py",
        "engine/test_micro_engine.py",
        "engine/test_sigint.py",
        "engine/test_snapshots.py",
        "engine/test_steady_memory.py",
        "engine/test_stored_weights.py",
        "engine/test_taking_turns.py",
        "engine/test_without_tokenizer.py",
        "programs/test_kept_programs.py",
        "programs/test_stored_kernels.py",
    ),
}
# Products, whose tests have nothing in common.
SPREAD = {"engine/test_greedy_matrix.py", "cards/test_every_card.py"}
# The fixtures that compile an engine, and the groups that use them.
ENGINES = {
    "plain_engine": "standard",
    "draft_engine": "standard",
    "coarse_engine": "standard",
    "micro_engine": "micro",
    "micro_drafting": "micro",
}
# Files whose tests are marked as long where they use a fixture that takes half a minute: (file, that fixture).
LONG = {
    ("benchmarks/test_device_check.py", "results"),
    ("benchmarks/test_check_shapes.py", "way"),
    ("programs/test_executables.py", "compiled"),
}
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


def group(test: str) -> str:
    """The group of a test, given as in `pytest tests/engine/test_api.py::test_end_tokens`."""
    file = test.partition("::")[0].removeprefix("tests/")
    for name, members in GROUPS.items():
        if file in members or file.partition("/")[0] in members:
            return name
    return test if file in SPREAD else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist loadscope`, but a group takes the place of a module. The marks of `--dist loadgroup` do not reach pytest-xdist
    3.8 from pytest 9.2."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: at for at, name in enumerate(GROUPS)}
    items.sort(key=lambda item: order.get(group(item.nodeid), len(order)))
    for item in items:
        if folder(item) == "cards":
            item.add_marker("cards")
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        if any((file, fixture) in LONG for fixture in getattr(item, "fixturenames", ())):
            item.add_marker("long")
        engines = [name for name in ENGINES if name in getattr(item, "fixturenames", ())]
        if engines:
            item.add_marker("engine")
            if group(item.nodeid) != ENGINES[engines[0]]:
                raise pytest.UsageError(f"{item.nodeid} uses {engines[0]}: its file belongs to {ENGINES[engines[0]]} in GROUPS")


def folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


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


_peaks: list[int] = []  # bytes that each test process has held at most


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    _peaks.append(getattr(node, "workeroutput", {}).get("peak", 0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        _peaks.append(peak)
    else:
        output["peak"] = peak


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"a test process held at most {max(_peaks, default=0) / 1e9:.1f} GB")
