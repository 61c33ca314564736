"""Figures of rows, and how they are shown: table, CSV, comparison and pictures."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from ninfer_jax.bench import plots, report
from ninfer_jax.bench.results import Row, Spread
from ninfer_jax.tables import show


def shown(table) -> str:
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_figures_of_a_row(row):
    """64 prompt tokens in 0.5, 1 and 0.25 s; 8 tokens decoded in 2, 1 and 4 s; 1 + 2 + 3 of 3 x 8 drafts."""
    own = row(energy=16.0)
    assert own.prefill == Spread(128, 64, 256)
    assert own.decode == Spread(4, 2, 8)
    assert own.ttft == Spread(0.5, 0.25, 1)
    assert own.rounds == Spread(4, 4, 4)
    assert own.acceptance == 6 / 24
    assert own.energy == Spread(2, 2, 2)


def test_what_has_no_figure_is_none(row):
    first_token_only = row(gen=1, draft=0, energy=1.0)
    assert (first_token_only.decode, first_token_only.energy, first_token_only.acceptance) == (None, None, None)


def test_rows_survive_json(row):
    for own in (row(), row(memory=None, context=512), row(refused="memory: no", slots=3)):
        assert Row.from_json(own.json()) == own
    assert row().json()["summary"]["prefill_tok_s"] == {"median": 128, "low": 64, "high": 256}
    assert (row().json()["how"], row(refused="x").json()["how"]) == ("measured", "refused")


def test_the_table_shows_medians_and_ranges(row):
    text = shown(report.table([row(energy=16.0), row(gen=1, draft=0, memory=None), row(prompt=9999, refused="memory: no")]))
    first, second, third = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert first == [
        "64",
        "9",
        "0",
        "f32",
        "2",
        "1",
        "73",
        "128.0 (64.0..256.0)",
        "4.0 (2.0..8.0)",
        "500.0 (250.0..1000.0)",
        "4",
        "25.0%",
        "1",
        "2.000 (2.000..2.000)",
    ]
    assert second[8] == second[11] == second[12] == second[13] == "n/a"
    assert third[:8] == ["9999", "9", "0", "f32", "2", "1", "", "refused"]
    assert "process peak RSS" in text and "measured: median" in text and "3 repeats after 1 warm-up" in text
    assert report.refusals([row(refused="memory: no")]) == ["refused: prompt 64, gen 9, depth 0, kv f32, K 2, slots 1: memory: no"]


def test_nothing_is_cut_off_in_a_narrow_terminal(row):
    console = Console(width=80, file=io.StringIO())
    long = row(
        kv="rk4v4-e8",
        context=262_144,
        prompt=262_000,
        gen=128,
        slots=4,
        memory=2**34,
        times=((300.0, 2.0), (99.5, 1.5), (400.0, 1.9)),
        energy=9999.9,
    )
    show(console, report.table([long]))
    (line,) = (line for line in console.file.getvalue().splitlines() if line.startswith("│"))
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "262000",
        "128",
        "0",
        "rk4v4-e8",
        "2",
        "4",
        "262144",
        "3493 (2620..10533)",
        "267.4 (254.0..338.7)",
        "300000 (99500..400000)",
        "16",
        "6.2%",
        "16,384",
        "19.685 (19.685..19.685)",
    ]


def test_csv(row):
    lines = list(csv.DictReader(io.StringIO(report.to_csv([row(), row(kv="rk4v4", refused="memory: a, b")]))))
    assert [lines[0][k] for k in ("how", "prompt", "kv", "draft", "context", "memory_what")] == [
        "measured",
        "64",
        "f32",
        "2",
        "73",
        "process peak RSS",
    ]
    assert [float(lines[0][k]) for k in ("prefill_tok_s", "prefill_tok_s_min", "prefill_tok_s_max", "ttft_s", "acceptance")] == [
        128,
        64,
        256,
        0.5,
        0.25,
    ]
    assert lines[0]["joules_per_token"] == ""
    assert (lines[1]["how"], lines[1]["refused"], lines[1]["prefill_tok_s"]) == ("refused", "memory: a, b", "")


def test_compare_gives_ratios_of_the_latest_old_row(row):
    new = [
        row(times=((0.25, 8.0), (0.25, 8.0), (0.25, 8.0))),
        row(depth=64),
        row(gen=7),
        row(gen=8, refused="no"),
        row(gen=10, memory=3 * 2**20),
    ]
    old = [
        row(times=((9.0, 9.0),), date="2026-11-01T00:00:00+00:00"),
        row(times=((0.5, 2.0),) * 3),
        row(depth=64),
        row(gen=8),
        row(gen=10, memory=2 * 2**20),
    ]
    lines = [
        [c.strip() for c in line.split("│")[1:-1]]
        for line in shown(report.compare(new, old, "old.json")).splitlines()
        if line.startswith("│")
    ]
    assert lines[0][7:10] == ["2.000x", "0.250x", "0.500x"]
    assert lines[1][7:12] == ["1.000x ~", "1.000x ~", "1.000x ~", "25.0%", "1.000x"]
    assert lines[2][7] == "not in the file" and lines[3][7] == "refused now"
    assert lines[4][11:] == ["1.500x", "n/a"]


def test_compare_says_what_differs(row):
    old = row(settings=row.settings | {"corpus": "other"}, versions=row.versions | {"jax": "0.11.2"})
    assert report.differences([row()], [old, row(gen=99)]) == ["corpus: other -> text", "jax: 0.11.2 -> 0.10.2"]
    assert report.differences([row()], [row()]) == []


def test_speed_by_depth_has_a_line_a_shape_with_ranges(row):
    rows = [
        row(depth=d, kv=kv, gen=gen, times=((t, t), (2 * t, 4 * t), (4 * t, 8 * t)))
        for kv, t in (("f32", 1), ("rk4v4", 2))
        for gen in (1, 9)
        for d in (128, 0)
    ]
    prefill, decode = plots.speed_by_depth(rows).axes
    lines = {c.get_label(): c for c in prefill.containers}
    assert set(lines) == {"kv f32", "kv rk4v4"}
    line, _, (bars,) = lines["kv f32"]
    assert line.get_xydata().tolist() == [[0, 32], [128, 32]]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[16, 64]] * 2
    assert {tuple(c[0].get_ydata()) for c in decode.containers} == {(2, 2), (1, 1)}


def test_acceptance_by_draft(row):
    rows = [row(draft=k, depth=d) for d in (0, 64) for k in (3, 0, 1)]
    (axes,) = plots.acceptance_by_draft(rows).axes
    assert {line.get_label(): line.get_xydata().tolist() for line in axes.lines} == {
        "depth 0": [[1, 0.5], [3, 1 / 6]],
        "depth 64": [[1, 0.5], [3, 1 / 6]],
    }
    assert plots.acceptance_by_draft([row(draft=0)]) is None


def test_memory_by_context_takes_the_largest_cell_of_an_engine(row):
    rows = [row(context=c, depth=d, memory=(c + d) * 2**20) for c in (1024, 512) for d in (0, 128, 64)] + [row(memory=None)]
    (axes,) = plots.memory_by_context(rows).axes
    assert axes.lines[0].get_xydata() == pytest.approx(np.array([[512, 640 / 1024], [1024, 1152 / 1024]]))
    assert axes.get_ylabel() == "GiB (process peak RSS)"


def test_pictures_are_written_and_those_left_out_are_named(row, tmp_path):
    made, left_out = plots.write([row(draft=0), row(draft=0, depth=64), row(draft=1, refused="no")], tmp_path)
    assert [p.name for p in made] == ["speed_by_depth.png", "memory_by_context.png"]
    assert left_out == ["acceptance_by_draft.png: no cell has a figure for it"]
    for path in made:
        assert np.ptp(imread(path)) > 0.5
