"""A plan as a terminal shows it, a bar and a table, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ninfer_jax import tables
from ninfer_jax.config import PAGE
from ninfer_jax.planning.choose import Choice

if TYPE_CHECKING:
    from ninfer_jax.planning.plan import Plan

# As many as a plan has parts.
_COLOURS = (
    *("blue", "cyan", "green", "magenta", "yellow", "red", "bright_blue", "bright_cyan", "bright_green", "bright_magenta"),
    *("dark_orange", "orchid", "chartreuse3", "sandy_brown", "steel_blue1", "plum1"),
)
_FREE = "grey50"
GIB = 2**30


def title(made: Plan, choice: Choice) -> str:
    """The configuration in a line."""
    shape = choice.budget.shape
    words = f"{made.target}: context {shape.context:,}, kv {shape.kv}, draft {shape.draft}, slots {shape.slots}"
    words += f", pool {shape.pool:,} tokens"
    words += f", recipe {shape.recipe.name}" if shape.recipe else ""
    words += f", drafter {shape.drafter}" if shape.lookup else ""
    if made.target == "cpu":
        words += f", kernels {'xla' if choice.config.kernels == 'xla' else 'cpu'}"
    return words


def show(console: Console, made: Plan, choice: Choice) -> None:
    """The whole plan."""
    console.print(title(made, choice), soft_wrap=True)
    if console.is_terminal and made.card:
        _bar(console, made)
    rows: list[tuple[str, str, str, str]] = []

    def row(what: str, count: int, how: str) -> None:
        rows.append((what, f"{count:,}", f"{count / GIB:.3f}", how))

    for role, count in made.weights.items():
        row(f"weights: {role}", count, "exact")
    row("KV pages", made.kv, "exact")
    row("states, slots, sampling", made.state, "exact")
    row("one slot's state on its way", made.staging, "exact")
    most = max(made.workspace.values(), default=0)
    for name, count in made.workspace.items():
        many = len(made.workspace) > 1
        row(f"workspace: {name}{' (counts)' if count == most else ''}" if many else "workspace", count, made.how)
    if made.executables:
        row("executables", made.executables, made.how)
    if made.allowance:
        row("CUDA context", made.allowance, "allowance")
    row("total", made.total, "")
    row("card" if made.target != "cpu" else "memory", made.card, "data sheet" if made.target != "cpu" else "free now")
    if made.taken:
        row("taken by others", made.taken, "")
    row("slack", made.slack, "")
    figures(console, ("what", "bytes", "GiB", "how known"), rows, right=(1, 2))
    if made.note:
        console.print(f"workspace is {made.how}: {made.note}", soft_wrap=True)
    fitting = ", ".join(f"{format} {tokens:,}" for format, tokens in made.max_context.items())
    console.print(f"largest context a slot that would fit, by KV format: {fitting}", soft_wrap=True)
    if made.kept:
        pages = max(0, made.kept - made.staging) // made.page * PAGE
        console.print(
            f"host memory for kept prefixes: at most {made.kept:,} bytes ({made.kept / GIB:.3f} GiB): a checkpoint takes "
            f"{made.staging:,} and {made.page:,} for each {PAGE} tokens before it; so {made.kept // (made.staging + made.page):,} "
            f"short ones, or one of {pages:,} tokens",
            soft_wrap=True,
        )


def compare(console: Console, plans: list[tuple[str, Plan]]) -> None:
    """Several plans side by side, in GiB."""
    names = list(dict.fromkeys(name for _, made in plans for name in made.parts()))
    rows = [(name, *(f"{made.parts().get(name, 0) / GIB:.3f}" for _, made in plans)) for name in names]
    rows += [("total", *(f"{made.total / GIB:.3f}" for _, made in plans))]
    rows += [("slack", *(f"{made.slack / GIB:.3f}" for _, made in plans))]
    rows += [("fits", *("yes" if made.fits else "no" for _, made in plans))]
    figures(console, ("GiB", *(words for words, _ in plans)), rows, right=tuple(range(1, len(plans) + 1)))


def figures(console: Console, header: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[int, ...]) -> None:
    """A table with a line before the total."""
    table = Table()
    for at, column in enumerate(header):
        table.add_column(column, justify="right" if at in right else "left", no_wrap=True)
    for row in rows:
        if row[0] == "total":
            table.add_section()
        table.add_row(*row)
    tables.show(console, table)


def _bar(console: Console, made: Plan) -> None:
    """A bar of the device by part, as wide as the terminal, and what its colours mean."""
    parts, width = made.parts(), console.width
    whole = max(made.card, sum(parts.values()))
    bar, legend, done, drawn = Text(), Text(), 0, 0
    for at, (name, count) in enumerate(parts.items()):
        colour, done = _COLOURS[at % len(_COLOURS)], done + count
        cells = round(done / whole * width) - drawn
        drawn += cells
        bar.append("█" * cells, style=colour)
        legend.append("■\u00a0", style=colour)
        legend.append(f"{name} {count / GIB:.2f}".replace(" ", "\u00a0") + "  ")  # breaks between the parts alone
    bar.append("░" * (width - drawn), style=_FREE)
    legend.append("░ ", style=_FREE)
    legend.append(f"free\u00a0{max(0, made.slack) / GIB:.2f}")
    console.print(bar)
    console.print(legend)


def picture(file: Path, plans: list[tuple[str, Plan]]) -> None:
    """The bars as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.8 * len(plans)))
    names = list(dict.fromkeys(name for _, made in plans for name in made.parts()))
    left = [0.0] * len(plans)
    for at, name in enumerate(names):
        sizes = [made.parts().get(name, 0) / GIB for _, made in plans]
        axes.barh(range(len(plans)), sizes, left=left, label=name, color=pyplot.get_cmap("tab20")(at % 20))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for at, (_, made) in enumerate(plans):
        axes.plot([made.card / GIB] * 2, [at - 0.4, at + 0.4], color="black")
    axes.set_yticks(range(len(plans)), [words for words, _ in plans] if len(plans) > 1 else [""])
    axes.invert_yaxis()
    axes.set_xlabel("GiB; the line is what the device has")
    if len(plans) == 1:
        axes.set_title(plans[0][0], fontsize=9)
    figure.legend(loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.12 + 0.1 / len(plans), 1, 1))
    figure.savefig(file, dpi=150, format="png")
    pyplot.close(figure)
