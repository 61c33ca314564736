"""`ninfer-jax doctor`: what this machine has, what is wrong with it, what to do about it, and whether the engine answers right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ninfer_jax.cli import common
from ninfer_jax.files import printable

if TYPE_CHECKING:
    from ninfer_jax.doctor import Finding, Inputs

_Option = typer.Option
_STYLES = {"fine": "green", "note": "yellow", "wrong": "bold red"}


def doctor(
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[bool, _Option("--report", help="Print a text for a bug report, without paths and prompts.")] = False,
    no_test: Annotated[bool, _Option("--no-test", help="Look only: no self-test, which runs the bundled model.")] = False,
) -> None:
    """Look at driver, card, processor, memory, disk and versions, and test each device; exit code 1 where something is wrong."""
    console = common.stderr_console()
    with common.one_line_errors(console):
        if as_json and report:
            raise ValueError("--json and --report are two ways to print the same: leave one of them out")
        from ninfer_jax.doctor import WRONG, read
        from ninfer_jax.doctor import report as text_of

        with console.status("looking at this machine"):
            inputs = read()
        out, found = Console(highlight=False), []
        for finding in _findings(console, inputs, not no_test):
            found.append(finding)
            if not (as_json or report):
                _show(out, finding)
        if as_json:
            print(json.dumps({"findings": [_as_json(finding) for finding in found]}))
        elif report:
            print(text_of(found), end="")
        if any(finding.status == WRONG for finding in found):
            raise typer.Exit(common.REFUSED)


def _findings(console: Console, inputs: Inputs, test: bool) -> Iterator[Finding]:
    from ninfer_jax.doctor import judge_card, judge_host, self_test

    yield from (*judge_host(inputs), *judge_card(inputs))
    if test:
        with console.status("the bundled model answers on each device (seconds; minutes where programs have to be compiled)"):
            yield from self_test(inputs)


def _show(out: Console, finding: Finding) -> None:
    """A line for what is there, and one for what to do."""
    out.print(f"[{_STYLES[finding.status]}]{finding.status:5s}[/] ", end="")
    out.print(f"{finding.name}: {printable(finding.text)}", markup=False, soft_wrap=True)
    if finding.advice:
        out.print(f"      -> {printable(finding.advice)}", markup=False, soft_wrap=True)


def _as_json(finding: Finding) -> dict:
    return {
        "name": finding.name,
        "status": finding.status,
        "text": finding.text,
        "advice": finding.advice,
        "facts": dict(finding.facts),
    }
