"""`ninfer-jax convert`: a checkpoint in, a quantised artifact out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint directory (plain or quantised), a GGUF file, or `tiny`.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The artifact's directory: empty, not there, or interrupted.")],
    recipe: Annotated[str, typer.Option(help="Formats of the weights: q4, q4-quality or w8.")] = "q4",
    draft_head: Annotated[int, typer.Option(help="Rows of a reduced head for drafts, picked by --draft-text; 0: none.")] = 0,
    draft_text: Annotated[
        Path | None, typer.Option(help="A text like those to be written, UTF-8: its tokens are kept first.")
    ] = None,
    mtp: Annotated[
        Path | None, typer.Option(help="A safetensors file with the MTP layer, where the checkpoint itself has none.")
    ] = None,
) -> None:
    """Quantise a checkpoint, or keep its own 4-bit codes, for `generate` to run."""
    console = Console(stderr=True, highlight=False, emoji=False)
    try:
        if bool(draft_head) != (draft_text is not None):
            raise ValueError("--draft-head N and --draft-text FILE go together: the rows are picked by the text's tokens")
        text = draft_text.read_text("utf-8") if draft_text else ""
        _run(console, source, destination, recipe, dict(draft_head=draft_head, draft_text=text, mtp=mtp))
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here", style="dim", soft_wrap=True)
        raise typer.Exit(130) from None


def _run(console: Console, source: Path, destination: Path, recipe: str, drafts: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # a card's memory is for the engine, and its rounding is not the CPU's
    from ninfer_jax.checkpoints import tiny_path
    from ninfer_jax.engine.convert import convert as run

    if source == Path("tiny") and not source.exists():
        source = tiny_path()
    # Where a write fails, Orbax's other writers complain that nobody waits for them any more; the error itself is raised.
    sys.unraisablehook = lambda unraisable: None

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage:8s}", total=total)
            bar.update(tasks[stage], completed=done)

        artifact = run(source, destination, recipe, **drafts, progress=show)
    for note in artifact.manifest["notes"]:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    about = artifact.manifest["source"]["format"]
    console.print(
        f"{destination}: {artifact.nbytes / 1e9:.2f} GB, recipe {recipe}, from {about}", style="dim", markup=False, soft_wrap=True
    )
