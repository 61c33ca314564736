"""`ninfer-jax`: the command line. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import typer

from ninfer_jax.cli.bench import bench
from ninfer_jax.cli.convert import convert
from ninfer_jax.cli.evaluate import evaluate
from ninfer_jax.cli.generate import generate
from ninfer_jax.cli.one_line import OneLineErrors
from ninfer_jax.cli.plan import compile_programs, plan

app = typer.Typer(
    cls=OneLineErrors,
    help="Run the hybrid Qwen3.5-family models on one card with fixed shapes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.command()(generate)
app.command()(convert)
app.command()(plan)
app.command("compile")(compile_programs)
app.command()(bench)
app.command("eval")(evaluate)

if __name__ == "__main__":
    app()
