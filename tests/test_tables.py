"""Tables in terminals of any width and through pipes: every figure stands there whole."""

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ninfer_jax.tables import show

FIGURES = ["1.289e-05", "123,456.78", "process peak RSS, MiB", "0.0000001234567"]


def table() -> Table:
    made = Table(title="figures", caption="how they came to be: measured")
    for head in ("kl p99", "tokens\na second", "memory", "state error"):
        made.add_column(head)
    made.add_row(*FIGURES)
    made.add_row("5", "", Text("n/a"), "[6]")
    return made


@pytest.mark.parametrize("width", [1, 20, 40, 80, 120])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_no_figure_is_cut(width, terminal):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, highlight=False, color_system=None)
    show(console, table())
    assert all(figure in out.getvalue() for figure in [*FIGURES, "measured"]) and "…" not in out.getvalue()
    assert console.width == width


def test_a_narrow_terminal_gets_records():
    out = io.StringIO()
    show(Console(file=out, width=30, force_terminal=True, highlight=False, color_system=None), table())
    assert out.getvalue().splitlines() == [
        "figures",
        "",
        "kl p99           1.289e-05",
        "tokens a second  123,456.78",
        "memory           process peak RSS, MiB",
        "state error      0.0000001234567",
        "",
        "kl p99           5",
        "memory           n/a",
        "state error      [6]",
        "",
        "how they came to be: measured",
    ]


def test_a_wide_terminal_gets_the_table():
    out = io.StringIO()
    show(Console(file=out, width=120, force_terminal=True), table())
    assert "┃" in out.getvalue()
