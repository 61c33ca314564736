"""The matrix as a whole: engines made once, rows kept at once, resumed, refused. Measuring itself is replaced."""

from __future__ import annotations

import json
import types
from pathlib import Path

import jax
import pytest

from ninfer_jax.bench import run as running
from ninfer_jax.bench.corpus import Corpus
from ninfer_jax.bench.matrix import by_engine, cells
from ninfer_jax.bench.measure import Sample
from ninfer_jax.bench.results import Results, read_rows
from ninfer_jax.bench.run import Bench, Settings

VERSIONS = {"jax": "1", "source": "s"}
SETTINGS = Settings("m", "w", "text", warmup=1, repeats=2, prefill_chunk=64, dtype="auto")


def groups(prompts=(64, 128), kvs=("f32", "rk4v4"), drafts=(0,), slots=(1,), contexts=(None,), gens=(8,)):
    wanted = cells(list(prompts), list(gens), [0], list(kvs), list(drafts), list(slots), list(contexts), 64)
    return by_engine(wanted, lambda group: 0)


class World:
    """Counts engines and runs. limit: tokens of context that fit; fails: exception of the n-th run."""

    def __init__(self, monkeypatch):
        self.engines, self.runs, self.limit, self.stop_at = [], [], 10**6, None
        monkeypatch.setattr(running, "measure", self.measure)

    def load(self, config):
        self.engines.append((config.kv, config.draft, config.slots, config.context))
        if config.draft:
            raise ValueError("draft is 1, but m has no MTP head")
        if config.context > self.limit:
            raise ValueError(f"memory: {config.context} bytes are needed, {self.limit} are free")
        return types.SimpleNamespace(context=config.context)

    def measure(self, engine, cell, texts, energy, tell):
        if len(self.runs) == self.stop_at:
            raise KeyboardInterrupt
        assert [len(text) for text in texts] == [cell.depth + cell.prompt] * cell.slots
        self.runs.append((cell, texts[0][0]))
        return Sample(cell.prompt, 1.0 + len(self.runs), 0.0, 1.0, cell.gen - 1, 1.0, 7, 0, 0, None)

    def run(self, results, matrix, settings=SETTINGS, versions=VERSIONS, corpus=5000, on_row=lambda row: None):
        bench = Bench(settings, versions, Corpus("text", list(range(corpus))), self.load, results, on_row=on_row)
        return bench.run(matrix)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_each_engine_once_and_every_run_of_other_text(world):
    rows = world.run(Results(), groups())
    assert world.engines == [("f32", 0, 1, 136), ("rk4v4", 0, 1, 136)]
    assert len(rows) == 4 and all(len(row.samples) == 2 and row.context == 136 and not row.refused for row in rows)
    starts = [start for cell, start in world.runs if cell == rows[0].cell]
    assert starts == [0, 64, 128]  # warm-up, and two repeats
    assert [s.prefill_s for s in rows[0].samples] == [3.0, 4.0]  # the warm-up is not among them


def test_the_file_is_whole_after_every_cell(world, tmp_path):
    file = tmp_path / "r.json"
    seen = []
    world.run(Results(file), groups(), on_row=lambda row: seen.append([r.cell for r in read_rows(file)]))
    assert [len(cells) for cells in seen] == [1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_an_interrupted_matrix_goes_on_where_it_was(world, tmp_path):
    file = tmp_path / "r.json"
    world.stop_at = 5  # in the second cell: three runs a cell
    with pytest.raises(KeyboardInterrupt):
        world.run(Results(file), groups())
    kept = read_rows(file)
    assert len(kept) == 1
    world.stop_at, world.runs, world.engines = None, [], []
    rows = world.run(Results(file, kept), groups())
    assert len(world.runs) == 3 * 3 and kept[0].cell not in {cell for cell, _ in world.runs}
    assert rows[0] == kept[0] and read_rows(file) == rows
    # An engine all of whose cells are there is not made at all; the other is as large as it would have been, whichever of
    # its cells is missing.
    for missing in (2, 3):
        world.engines.clear()
        kept = [row for at, row in enumerate(rows) if at != missing]
        again = world.run(Results(file, kept), groups())
        assert [row for at, row in enumerate(again) if at != missing] == kept
        assert world.engines == [("rk4v4", 0, 1, 136)]


@pytest.mark.parametrize("change", ["repeats", "source"])
def test_other_settings_or_versions_are_measured_again(world, tmp_path, change):
    file = tmp_path / "r.json"
    first = world.run(Results(file), groups(kvs=("f32",)))
    settings = Settings("m", "w", "text", 1, 1, 64, "auto") if change == "repeats" else SETTINGS
    versions = VERSIONS if change == "repeats" else VERSIONS | {"source": "t"}
    again = world.run(Results(file, read_rows(file)), groups(kvs=("f32",)), settings, versions)
    assert len(world.engines) == 2 and first != again
    assert read_rows(file) == first + again  # the old rows stay


def test_the_largest_cells_are_refused_and_a_smaller_engine_runs_the_rest(world):
    world.limit = 200
    rows = world.run(Results(), groups(prompts=(64, 128, 500, 300), kvs=("f32",)))
    assert [c for *_, c in world.engines] == [508, 308, 136]
    assert [row.refused for row in rows] == [
        None,
        None,
        "memory: 508 bytes are needed, 200 are free",
        "memory: 308 bytes are needed, 200 are free",
    ]
    assert [row.context for row in rows] == [136, 136, None, None]


def test_an_engine_without_an_mtp_head_refuses_only_its_own_cells(world):
    rows = world.run(Results(), groups(kvs=("f32",), drafts=(1, 0)))
    assert [row.refused for row in rows] == ["draft is 1, but m has no MTP head"] * 2 + [None] * 2


def test_a_given_context_is_the_engines(world):
    rows = world.run(Results(), groups(kvs=("f32",), contexts=(100, 4096)))
    assert [c for *_, c in world.engines] == [100, 4096]
    assert [row.refused for row in rows] == [None, "context: 136 tokens are needed, --context is 100", None, None]
    world.limit = 1000
    rows = world.run(Results(), groups(kvs=("f32",), contexts=(4096,)))
    assert [row.refused for row in rows] == ["memory: 4096 bytes are needed, 1000 are free"] * 2
    assert len(world.engines) == 3


def test_a_short_corpus_refuses_the_cells_that_need_more(world):
    rows = world.run(Results(), groups(kvs=("f32",)), corpus=200)
    assert rows[0].refused is None
    assert rows[1].refused.startswith("corpus: 384 tokens are needed (3 runs x 1 slots x 128), text has 200;")
    assert world.engines == [("f32", 0, 1, 72)]


def test_a_device_out_of_memory_is_a_refusal_and_another_failure_is_not(world, monkeypatch):
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.\nmore"

    def fail(config):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(world, "load", fail)
    rows = world.run(Results(), groups(prompts=(64,), kvs=("f32",)))
    assert rows[0].refused == "memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes."
    message = "INTERNAL: broken"
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        world.run(Results(), groups(prompts=(64,), kvs=("f32",)))


def test_what_was_refused_is_tried_again(world, tmp_path):
    file = tmp_path / "r.json"
    world.limit = 10
    assert all(row.refused for row in world.run(Results(file), groups(kvs=("f32",))))
    world.limit = 1000
    rows = world.run(Results(file, read_rows(file)), groups(kvs=("f32",)))
    assert not any(row.refused for row in rows) and read_rows(file) == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not JSON"),
        ("[]", "not a file of"),
        ('{"rows": []}', "not a file of"),
        ('{"ninfer_jax_bench": 1, "rows": [{"cell": {}}]}', "a row is damaged"),
        ('{"ninfer_jax_bench": 1}', "a row is damaged"),
    ],
)
def test_files_of_another_kind(tmp_path, text, words):
    file: Path = tmp_path / "x.json"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=words) as caught:
        read_rows(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_the_old_file(world, tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    results = Results(file)
    world.run(results, groups(kvs=("f32",)))
    before = file.read_text()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(running.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.write()
    assert file.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert len(json.loads(before)["rows"]) == 2
