"""`ninfer-jax`: the command line. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import typer

from ninfer_jax.cli.generate import generate

app = typer.Typer(
    help="Run the hybrid Qwen3.5-family models on one card with fixed shapes.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def _commands() -> None:
    """Keeps `generate` a subcommand while it is the only one."""


app.command()(generate)

if __name__ == "__main__":
    app()
