"""Compiling many cases: in one process or several, with a bar on stderr, one failure not taking the others along."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_kernels.lab import registry, rows

# Of a case: the op and the name it is found by, and the block sizes to compile it with (None: its own choice).
Task = tuple[str, str, Any]


def compiled(tasks: Sequence[Task], target: str, jobs: int = 1) -> Iterator[rows.Row | str]:
    """The row of each task in turn, or a line that says what went wrong with it.

    jobs: processes; each takes about 1 GB and some seconds to start.
    """
    if jobs < 1:
        raise ValueError(f"--jobs: {jobs} processes, must be at least 1")
    if jobs == 1 or len(tasks) < 2:
        yield from (_measure(task, target) for task in tasks)
        return
    # Children compile for a description of a card: they must not each reserve the memory of one that is there.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(tasks)), context) as pool:
        yield from pool.map(_measure, tasks, [target] * len(tasks))


def _measure(task: Task, target: str) -> rows.Row | str:
    op, name, config = task
    (case,) = (c for c in registry.cases([op]) if c.name == name)
    try:
        return rows.measure(case, target, config)
    except Exception as e:  # whatever a compiler says about one case must not end the run
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        return f"{op}/{name}{f' {config}' if config is not None else ''}: {first}"


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """A function to call with the name of what has just been done; a bar where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
        # Rows printed to the same terminal go above the bar; those written to a file stay out of it.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
