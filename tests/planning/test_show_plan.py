"""The plan as people see it: a bar that is as long as the terminal, figures that are never cut, a picture."""

import json
import re

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from ninfer_jax.cli.main import app
from ninfer_jax.planning.plan import Plan

ASKED = ["plan", "qwen3_8_27b", "--target", "rtx4090"]


def test_the_parts_add_up_and_json_has_them():
    found = json.loads(CliRunner().invoke(app, [*ASKED, "--json"]).stdout)
    parts = [found[f"{name}_bytes"] for name in ("weights", "kv", "state", "staging", "workspace", "executables", "allowance")]
    assert sum(parts) == found["total_bytes"] and found["card_bytes"] - found["total_bytes"] == found["slack_bytes"] > 0
    assert found["fits"] and found["configuration"]["kv"] == "rk4v4-e8" and found["configuration"]["recipe"] == "q4"
    assert found["workspace_how"].startswith("recorded")


@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_no_figure_is_cut_at_any_width(width):
    whole = json.loads(CliRunner().invoke(app, [*ASKED, "--json"]).stdout)
    for more in ([], ["--compare", "team", "--compare", "kv=int8,slots=1"]):
        told = CliRunner().invoke(app, [*ASKED, *more], env={"COLUMNS": str(width)}).stdout
        assert "…" not in told
        assert f"{whole['total_bytes']:,}" in told or f"{whole['total_bytes'] / 2**30:.3f}" in told


def test_the_bar_is_as_long_as_the_terminal_and_in_proportion(monkeypatch):
    import io

    from rich.console import Console

    from ninfer_jax.cli import show_plan
    from ninfer_jax.cli.plan import place_of
    from ninfer_jax.config import EngineConfig
    from ninfer_jax.planning.choose import choose
    from ninfer_jax.planning.known import known_of
    from ninfer_jax.planning.plan import quick_plan

    known, place = known_of("qwen3_8_27b"), place_of("rtx4090")
    choice = choose(known.model, EngineConfig(), place, "auto")
    made: Plan = quick_plan(known.model, choice)
    out = io.StringIO()
    show_plan.show(Console(file=out, width=100, force_terminal=True, color_system=None), made, choice)
    (bar,) = (line for line in out.getvalue().splitlines() if re.fullmatch("[█░]+", line))
    assert len(bar) == 100 and abs(bar.count("█") - 100 * made.total / made.card) <= 1


def test_pictures_of_one_and_of_several(tmp_path):
    for more in ([], ["--compare", "kv=int8", "--compare", "full"]):
        file = tmp_path / f"{len(more)}.png"
        done = CliRunner().invoke(app, [*ASKED, *more, "--plot", str(file)])
        assert done.exit_code == 0, done.output
        height, width, _ = imread(file).shape
        assert width > 1000 and height > 200 and imread(file).std() > 0.05


@pytest.mark.parametrize("words", ["nonsense", "kv", "color=red", "slots=many"])
def test_a_comparison_that_is_none_is_refused_in_one_line(words):
    done = CliRunner().invoke(app, [*ASKED, "--compare", words])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and words.split("=")[0] in done.stderr
