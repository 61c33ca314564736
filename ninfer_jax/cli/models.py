"""`ninfer-jax models`: what is kept of models on this machine, fetched and removed by name."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ninfer_jax.cli import common
from ninfer_jax.files import FileError, printable
from ninfer_jax.models import HubName, hub, kept, read_name
from ninfer_jax.models.kept import bytes_of, size

models = typer.Typer(help="List, fetch and remove what is kept of models on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@models.command("list")
def list_models(as_json: AsJson = False) -> None:
    """Converted checkpoints, and what of the Hub's cache is used, with sizes and places."""
    with common.one_line_errors(common.stderr_console()):
        found, fetched = kept.listed(), hub.records()
        about = {
            "converted_in": str(kept.root()),
            "converted": [
                {"name": k.name, "model": k.model, "recipe": k.recipe, "state": k.state, "bytes": k.bytes, "path": str(k.path)}
                for k in found
            ],
            "hub_cache": str(hub.cache()),
            "fetched": [_as_json(snapshot) for snapshot in fetched],
        }
    if as_json:
        print(json.dumps(about))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("model", "kept as", "size", "place"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for k in found:
        words = {"whole": "", "unfinished": ", unfinished", "old": ", of an earlier version"}[k.state]
        table.add_row(printable(k.model), f"{k.recipe}{words}", size(k.bytes), printable(str(k.path)))
    for snapshot in about["fetched"]:
        words = "" if snapshot["whole"] else ", not whole"
        table.add_row(printable(snapshot["model"]), f"as fetched{words}", size(snapshot["bytes"]), printable(snapshot["path"]))
    if found or fetched:
        console.print(table, soft_wrap=True)
    else:
        console.print("nothing is kept", markup=False)
    console.print(
        f"converted: {about['converted_in']}; the Hub's cache: {about['hub_cache']}", style="dim", markup=False, soft_wrap=True
    )


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id: org/name, org/name@revision, org/name:FILE.gguf.")],
) -> None:
    """Fetch a model of the Hub, or a newer commit of one that was fetched, without running it."""
    console = common.stderr_console()
    with common.one_line_errors(console, interrupted="interrupted; the same command goes on from here"):
        place = read_name(name)
        if not isinstance(place, HubName):
            raise FileError(f"{name} is no Hub id: there is nothing to fetch")
        with common.stages(console) as show:
            snapshot = hub.fetch(place, common.teller(console), show, again=True)
    print(snapshot.source)


@models.command()
def remove(
    name: Annotated[
        str, typer.Argument(help="A name that `models list` shows: of a model, or `model/recipe-key` of --json for one.")
    ],
) -> None:
    """Remove converted checkpoints of a model, and the record of what was fetched. The Hub's cache is left to `hf cache rm`."""
    console = common.stderr_console()
    with common.one_line_errors(console):
        chosen = [k for k in kept.listed() if name in (k.model, k.name, k.path.parent.name)]
        fetched = [s for s in hub.records() if str(s.name) == name]
        if not chosen and not fetched:
            raise FileError(f"nothing is kept of {name}: `ninfer-jax models list` shows what is")
        for k in chosen:
            kept.remove(k)
            print(printable(f"removed {k.name}: {size(k.bytes)}"))
        for snapshot in fetched:
            hub.forget(snapshot.name)
            there = bytes_of(hub.repository(snapshot.name.repo)) if hub.repository(snapshot.name.repo).is_dir() else 0
            if there:
                line = f"{size(there)} of it stay in the Hub's cache, which other programs use too:"
                print(printable(f"{line} `hf cache rm model/{snapshot.name.repo}`"))


def _as_json(snapshot: hub.Snapshot) -> dict[str, Any]:
    there = {name: n for name, n in snapshot.files.items() if (snapshot.folder / name).is_file()}
    about = {"model": str(snapshot.name), "commit": snapshot.commit, "whole": snapshot.whole}
    return about | {"bytes": sum(there.values()), "path": str(snapshot.source)}
