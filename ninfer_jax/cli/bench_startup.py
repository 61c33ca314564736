"""`ninfer-jax bench startup`: how long a start takes, phase by phase, with nothing compiled before and with everything."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ninfer_jax.cli import common
from ninfer_jax.config import EngineConfig
from ninfer_jax.models import checked, short_name
from ninfer_jax.tables import show

_Option = typer.Option


def startup(
    model: common.Model,
    context: common.Context = None,
    kv: common.Kv = None,
    draft: common.Draft = None,
    slots: common.Slots = None,
    pool: common.Pool = None,
    prefill_chunk: common.Chunk = None,
    kernels: common.Kernels = "auto",
    warm: Annotated[int, _Option(help="Starts that find what the first has compiled; the table has their median.")] = 3,
    no_verify: common.NoVerify = False,
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the phases of a start: imports, plan, weights, programs, first token; cold, then warm."""
    console = common.stderr_console()
    with common.one_line_errors(console):
        if warm < 0:
            raise ValueError(f"--warm is {warm}, it must be 0 or more")
        checked(model)
        given = {"context": context, "kv": kv, "draft": draft, "slots": slots, "pool": pool}
        config: dict[str, Any] = given | {"prefill_chunk": prefill_chunk, "kernels": kernels}
        EngineConfig(**config)  # a mistake should not wait for a process
        from ninfer_jax.bench.startup import rows, starts

        found = []
        with console.status("") as status:
            status.update("a cold start")
            for start in starts(model, config, {"verify": not no_verify}, warm):
                found.append(start)
                status.update(f"{len(found)} of {warm + 1} starts")
    if as_json:
        print(json.dumps({"model": short_name(model), "starts": [start.json() for start in found]}))
        return
    title = f"{short_name(model)} on {found[0].device}: seconds of a start (measured; cold: nothing compiled before)"
    table = Table(title=title, title_justify="left")
    for head in ("phase", "cold", f"warm, median of {warm}"):
        table.add_column(head, justify="left" if head == "phase" else "right")
    for row in rows(found):
        if row[0] == "total":
            table.add_section()
        table.add_row(*row)
    show(Console(highlight=False), table)
