"""Tables whose figures are never cut: as wide as they have to be where nobody looks, as records where a terminal is too narrow."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(console: Console, table: Table) -> None:
    """Print `table` whole: in a terminal that is too narrow for it as records, a figure a line; through a pipe in full width."""
    needed = Console(width=10_000).measure(table).maximum
    if needed <= console.width:
        console.print(table)
    elif not console.is_terminal:
        before = console.width
        console.width = needed
        console.print(table)
        console.width = before
    else:
        _records(console, table)


def _records(console: Console, table: Table) -> None:
    """Row after row, each figure behind the name of its column; empty ones are left out."""
    if table.title:
        _line(console, _flat(table.title))
    heads = [_flat(column.header) for column in table.columns]
    width = max(map(len, heads), default=0)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        console.print()
        for head, cell in zip(heads, map(_flat, row), strict=True):
            if cell:
                _line(console, f"{head:{width}s}  {cell}")
    if table.caption:
        console.print()
        _line(console, _flat(table.caption))


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _flat(content: object) -> str:
    """The words of a cell or a head, on one line."""
    text = content.plain if isinstance(content, Text) else str(content)
    return " ".join(text.split())
