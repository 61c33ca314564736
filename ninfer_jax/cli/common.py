"""The common ground of all commands: options with help from the tables, paths, and errors on one line with their exit codes.

Exit codes: 0 done, 1 refused or failed, 2 a mistake in the command line, 130 interrupted. Nothing here starts JAX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ninfer_jax.cli.entry import INTERRUPTED
from ninfer_jax.cli.settings import tell_commands
from ninfer_jax.config import MAX_CONTEXT, MAX_DRAFT, MAX_SLOTS, PRESETS, RECIPES
from ninfer_jax.config.engine import CACHE_MODES, DRAFTERS, DTYPES, KERNELS
from ninfer_jax.files import printable
from ninfer_jax.model_path import TINY
from ninfer_jax.planning.nearest import DoesNotFit
from pallas_kernels.kv_formats import FORMATS, PAGE

REFUSED = 1

KV_FORMATS = ", ".join(FORMATS)
RECIPE_NAMES = ", ".join(RECIPES)
PRESET_NAMES = ", ".join(PRESETS)

_Option = typer.Option


def a_path(text: str) -> Path:
    """A path of the command line; an empty one, as an unset variable of a shell makes it, would be the working directory."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


def path_option(help: str, *names: str, metavar: str = "FILE") -> typer.models.OptionInfo:
    """An option for one path."""
    return _Option(*names, help=help, metavar=metavar, parser=a_path)


def auto_number(text: str) -> int | None:
    """A whole number, None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid integer") from None


def _auto_option(help: str) -> typer.models.OptionInfo:
    return _Option(help=help, metavar="INTEGER", parser=auto_number, show_default="auto")


Model = Annotated[
    str,
    typer.Argument(
        help=f"A directory, a GGUF file, a Hub id (org/name, org/name@revision, org/name:FILE.gguf), or `{TINY}`, the bundled one."
    ),
]
Context = Annotated[int | None, _auto_option(f"Capacity of a slot in tokens, up to {MAX_CONTEXT}.")]
Kv = Annotated[str | None, _Option(help=f"KV format: {KV_FORMATS}.", show_default="auto")]
Draft = Annotated[int | None, _auto_option(f"K, tokens that are drafted a round, 0 to {MAX_DRAFT}.")]
Drafter = Annotated[str, _Option(help=f"Who drafts: {', '.join(f'{name} ({words})' for name, words in DRAFTERS.items())}.")]
Slots = Annotated[int | None, _auto_option(f"Sequences side by side, 1 to {MAX_SLOTS}.")]
Pool = Annotated[int | None, _auto_option("Tokens that all slots share: every slot its whole context, or what fits.")]
Chunk = Annotated[int | None, _auto_option(f"Tokens of one prefill call, a multiple of {PAGE}.")]
Profile = Annotated[
    str | None,
    _Option(help="A named configuration (docs/defaults.md): full, team, or one of yours. Options that are given go before it."),
]
Dtype = Annotated[str, _Option(help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")]
Kernels = Annotated[str, _Option(help=f"On a CPU: {', '.join(f'{name} ({words})' for name, words in KERNELS.items())}.")]
_MODES = ", ".join(f"{name} ({words})" for name, words in CACHE_MODES.items())
PrefixCache = Annotated[str, _Option(help=f"Whether prefilled prefixes are kept: {_MODES}.")]
CacheBytes = Annotated[int | None, _Option(help="Host memory for them; default: a quarter of what is free, at most 8 GiB.")]
CacheDir = Annotated[Path | None, path_option("Keep prefixes from start to start; made if it is not there.", metavar="DIRECTORY")]
CacheDirBytes = Annotated[int | None, _Option(help="Bytes of it at most; default: 64 GiB.")]
Converted = Annotated[
    str | None,
    _Option(
        "--recipe", help=f"Convert a checkpoint once, and keep that: {RECIPE_NAMES}, or none; default: q4 on a card, none on a CPU."
    ),
]
NoVerify = Annotated[bool, _Option("--no-verify", help="Of an artifact: leave its digests unchecked.")]
NoProgramCache = Annotated[bool, _Option("--no-program-cache", help="Neither use nor keep programs of earlier starts.")]
NoTokenizer = Annotated[
    bool, _Option("--no-tokenizer", help="Do without a tokenizer: token ids alone, as many as the output head has rows.")
]


def cache_settings(cache_bytes: int | None, cache_dir: Path | None, cache_dir_bytes: int | None) -> dict[str, Any]:
    """Fields of `EngineConfig` for what was given of the prefix cache."""
    given = {"cache_bytes": cache_bytes, "cache_dir": cache_dir, "cache_dir_bytes": cache_dir_bytes}
    return {field: value for field, value in given.items() if value is not None}


def stderr_console() -> Console:
    """The console that everything but the answer goes to."""
    return Console(stderr=True, highlight=False, emoji=False)


@contextmanager
def one_line_errors(
    console: Console, interrupted: str = "", also: tuple[type[Exception], ...] = (), context: typer.Context | None = None
) -> Iterator[None]:
    """Turns what a user can mend into one line on stderr and its exit code. interrupted: what to say after Ctrl-C. also:
    exceptions beside ValueError and OSError that are no faults of the program's. context: of the command; what does not fit is
    followed by commands that would."""
    try:
        yield
    except BrokenPipeError:
        # Whoever read stdout has gone (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(REFUSED) from None
    except (ValueError, OSError, *also) as error:
        tell_error(console, str(error))
        if context is not None and isinstance(error, DoesNotFit):
            tell_commands(console, context, error.changes)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        if interrupted:
            console.print(interrupted, style="dim", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def tell_error(console: Console, message: str) -> None:
    """One line: `error: ...`."""
    console.print(f"error: {printable(message)}", style="bold red", markup=False, soft_wrap=True)


def teller(console: Console) -> Callable[[str], None]:
    """Says lines, of what is fetched and converted, to the console."""
    return lambda line: console.print(printable(line), style="dim", markup=False, soft_wrap=True)


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage that is told of, (stage, bytes done, bytes in all). They vanish when done, and do not
    show where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage:10s}", total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def tell_notes(console: Console, notes: tuple[str, ...] | list[str]) -> None:
    """A line each: settings of the user's files that have no effect, and what else they should know."""
    for note in notes:
        console.print(f"note: {printable(note)}", style="dim", markup=False, soft_wrap=True)
