"""From a command's options and a profile to an engine's settings, and back to a command that can be typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ninfer_jax.planning.choose import Choice

_SECRET = ("api_key",)


def with_profile(context: typer.Context, name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, options by name, with a profile's values where an option was not typed; those that the command does not have stay
    out. A limit of the card's power is set at once."""
    if name is None:
        return given
    from ninfer_jax.planning.power import limit_power
    from ninfer_jax.planning.profiles import profile

    found = profile(name)
    more = dict(found.settings) | ({"recipe": found.recipe} if found.recipe else {})
    if found.power_watts is not None and context.info_name in ("generate", "serve", "bench", "eval"):
        limit_power(found.power_watts)
    return given | {field: value for field, value in more.items() if field in given and not typed(context, field)}


def typed(context: typer.Context, name: str) -> bool:
    """Whether an option stands in the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def command_with(context: typer.Context, changes: Mapping[str, Any]) -> str:
    """The command line of `context` with other values of some options, as a line to type."""
    words, arguments, options = context.command_path.split(), [], []
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        if value is None or name in _SECRET:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif typed(context, name) and name not in changes:
            option = max(parameter.opts, key=len)
            if value is True:
                options.append(option)
            else:
                for item in value if isinstance(value, list | tuple) else [value]:
                    options += [option, str(item)]
    for field, value in changes.items():
        options += [f"--{field.replace('_', '-')}", str(value)]
    return shlex.join([*words, *arguments, *options])


def tell_commands(console: Console, context: typer.Context, changes: list[dict[str, Any]]) -> None:
    """Print configurations that would fit instead, a command a line."""
    for change in changes:
        console.print(f"  fits: {command_with(context, change)}", markup=False, soft_wrap=True)


def tell_choice(console: Console, choice: Choice | None) -> None:
    """Print what was chosen and why, in one line; nothing where nothing was."""
    if choice is not None and (line := choice.line()):
        console.print(line, style="dim", markup=False, soft_wrap=True)
