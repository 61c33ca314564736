"""`ninfer-jax`: the command line. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from ninfer_jax import __version__
from ninfer_jax.cli.bench import bench
from ninfer_jax.cli.bench_startup import startup
from ninfer_jax.cli.convert import convert
from ninfer_jax.cli.doctor import doctor
from ninfer_jax.cli.evaluate import evaluate
from ninfer_jax.cli.generate import generate
from ninfer_jax.cli.launch import launch
from ninfer_jax.cli.models import models
from ninfer_jax.cli.one_line import OneLineErrors, WithDefault
from ninfer_jax.cli.plan import compile_programs, plan
from ninfer_jax.cli.serve import serve

app = typer.Typer(
    cls=OneLineErrors,
    help="Run the hybrid Qwen3.5-family models on one card with fixed shapes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


benches = typer.Typer(
    cls=WithDefault,
    help="Measure a model: `bench MODEL` its speed over many shapes (`bench MODEL --help`), `bench startup MODEL` its start.",
    no_args_is_help=True,
)
benches.command("run")(bench)
benches.command()(startup)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ninfer-jax {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run the hybrid Qwen3.5-family models on one card with fixed shapes."""


app.command()(generate)
app.command()(serve)
app.command()(launch)
app.command()(convert)
app.command()(plan)
app.command("compile")(compile_programs)
app.add_typer(benches, name="bench")
app.command("eval")(evaluate)
app.command()(doctor)
app.add_typer(models, name="models")

if __name__ == "__main__":
    from ninfer_jax.cli.entry import main

    main()
