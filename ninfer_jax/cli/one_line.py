"""Mistakes in a command line, told on one line like every other error."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperGroup

from ninfer_jax.cli.common import INTERRUPTED
from ninfer_jax.files import printable


class WithDefault(TyperGroup):
    """Commands of which one is meant where none of their names comes first: `bench MODEL` is `bench run MODEL`."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class OneLineErrors(TyperGroup):
    """Commands whose parse errors are `error: ...; see ... --help` instead of usage and a box of several lines."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except KeyboardInterrupt:  # before a command could deal with it; older versions of Typer let it through
            sys.exit(INTERRUPTED)
        except Exception as raised:
            error: Any = raised
            if type(error).__name__ == "Abort":
                sys.exit(INTERRUPTED)
            # Typer's own copy of click raises them in some versions, click in others: told by what they can do.
            mistake: Any = error
            if not hasattr(mistake, "format_message") or not hasattr(mistake, "exit_code"):
                raise
            context = getattr(mistake, "ctx", None)
            if type(error).__name__ == "NoArgsIsHelpError":
                print(mistake.format_message(), file=sys.stderr)
            else:
                message = printable(" ".join(mistake.format_message().split()).rstrip("."))
                print(f"error: {message}; see `{context.command_path if context else 'ninfer-jax'} --help`", file=sys.stderr)
            sys.exit(mistake.exit_code)
        sys.exit(code if isinstance(code, int) else 0)
