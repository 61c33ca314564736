"""`ninfer-jax convert`: a checkpoint in, a quantised artifact out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ninfer_jax.cli import common
from ninfer_jax.config import Recipe
from ninfer_jax.config import recipe as recipe_called
from ninfer_jax.files import read_text, regular_file
from ninfer_jax.model_path import TINY, destination_path
from ninfer_jax.models import source_of
from ninfer_jax.models.kept import size


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help=f"A checkpoint directory (plain or quantised), a GGUF file, a Hub id, or `{TINY}`.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="The artifact's directory: empty, not there, or interrupted.")],
    recipe: Annotated[str, typer.Option(help=f"Formats of the weights: {common.RECIPE_NAMES}.")] = "q4",
    draft_head: Annotated[int, typer.Option(help="Rows of a reduced head for drafts, picked by --draft-text; 0: none.")] = 0,
    draft_text: Annotated[
        Path | None, common.path_option("A text like those to be written, UTF-8: its tokens are kept first.")
    ] = None,
    no_tokenizer: common.NoTokenizer = False,
    mtp: Annotated[
        Path | None, common.path_option("A safetensors file with the MTP layer, where the checkpoint itself has none.")
    ] = None,
) -> None:
    """Quantise a checkpoint, or keep its own 4-bit codes, for `generate` to run."""
    console = common.stderr_console()
    with common.one_line_errors(console, interrupted="interrupted; the same command goes on from here"):
        if bool(draft_head) != (draft_text is not None):
            raise ValueError("--draft-head N and --draft-text FILE go together: the rows are picked by the text's tokens")
        place = destination_path(destination, "DST", "DST ")
        if mtp is not None:
            regular_file(mtp, label="--mtp ")
        chosen = recipe_called(recipe)
        options = {"draft_head": draft_head, "draft_text": read_text(draft_text, label="--draft-text ") if draft_text else ""}
        with common.stages(console) as show:
            found = source_of(source, common.teller(console), show)
        _run(console, found, place, chosen, options | {"tokenizer": None if no_tokenizer else "auto", "mtp": mtp})


def _run(console: Console, source: Path, destination: Path, recipe: Recipe, options: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # a card's memory is for the engine, and its rounding is not the CPU's
    from ninfer_jax.engine.convert import convert as run

    # Where a write fails, Orbax's other writers complain that nobody waits for them any more; the error itself is raised.
    sys.unraisablehook = lambda unraisable: None

    with common.stages(console) as show:
        artifact = run(source, destination, recipe, **options, progress=show)
    common.tell_notes(console, artifact.manifest["notes"])
    about = artifact.manifest["source"]["format"]
    console.print(
        f"{destination}: {size(artifact.nbytes)}, recipe {recipe.name}, from {about}", style="dim", markup=False, soft_wrap=True
    )
