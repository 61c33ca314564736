"""`ninfer-jax plan` and `ninfer-jax compile`: what a configuration takes on a card, and its programs as files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from ninfer_jax.programs.plan import Plan
    from ninfer_jax.programs.setup import Setup

_Option = typer.Option
OVER_BUDGET = 3

Model = Annotated[str, typer.Argument(metavar="MODEL|PRESET", help="A model directory, or qwen3_6_27b, qwen3_8_27b.")]
Recipe = Annotated[str | None, _Option(help="Formats of the weights: q4, q4-quality, w8; default: as the model has them.")]
Context = Annotated[int | None, _Option(help="Capacity of a slot in tokens; default: the model's own, up to 262144.")]
Kv = Annotated[str | None, _Option(help="KV format: f32, bf16, int8, rk8v4, rk4v4, rk4v4-e8.")]
Draft = Annotated[int, _Option(help="Tokens the MTP head drafts a round, 0 to 5.")]
Slots = Annotated[int, _Option(help="Sequences side by side, 1 to 4.")]
Pool = Annotated[int | None, _Option(help="Tokens that all slots share; default: every slot its whole context.")]
Chunk = Annotated[int, _Option("--prefill-chunk", help="Tokens of one prefill call.")]
Dtype = Annotated[str, _Option(help="auto, float32 or bfloat16.")]


def plan(
    model: Model,
    recipe: Recipe = None,
    target: Annotated[str, _Option(help="The card, or cpu.")] = "rtx4090",
    context: Context = None,
    kv: Kv = None,
    draft: Draft = 0,
    slots: Slots = 1,
    pool: Pool = None,
    prefill_chunk: Chunk = 1024,
    dtype: Dtype = "auto",
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile for a card that need not be here and say where every byte goes. Exit 3 if it does not fit."""
    console = Console(stderr=True, highlight=False)
    try:
        setup = _setup(
            model,
            recipe,
            target,
            dict(context=context, kv=kv, draft=draft, slots=slots, pool=pool, prefill_chunk=prefill_chunk, dtype=dtype),
        )
        with tempfile.TemporaryDirectory() as folder:
            made = _compile(console, setup, target, Path(folder))
    except (ValueError, RuntimeError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(made.json()))
    else:
        _show(Console(highlight=False), made, setup)
    if not made.fits:
        console.print(_advice(made), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(OVER_BUDGET)


def compile_programs(
    model: Model,
    out: Annotated[Path, _Option(help="Directory for the executables.")],
    target: Annotated[str, _Option(help="Cards by commas, or cpu: rtx4090,h200.")] = "rtx4090",
    recipe: Recipe = None,
    context: Context = None,
    kv: Kv = None,
    draft: Draft = 0,
    slots: Slots = 1,
    pool: Pool = None,
    prefill_chunk: Chunk = 1024,
    dtype: Dtype = "auto",
    report: Annotated[Path | None, _Option(help="Write the compiled facts as JSON.")] = None,
) -> None:
    """Compile all programs of a configuration and write them for `generate --programs`."""
    from ninfer_jax.programs.executables import writing

    console = Console(stderr=True, highlight=False)
    shapes = dict(context=context, kv=kv, draft=draft, slots=slots, pool=pool, prefill_chunk=prefill_chunk, dtype=dtype)
    facts = {}
    try:
        names = [name.strip() for name in target.split(",") if name.strip()]
        setups = {name: _setup(model, recipe, name, shapes) for name in names}
        with writing(out):  # mistakes should not wait for minutes of compiling
            out.mkdir(parents=True, exist_ok=True)
        if report and not report.resolve().parent.is_dir():
            raise ValueError(f"--report {report}: there is no directory {report.resolve().parent}")
        for name, setup in setups.items():
            _compile(console, setup, name, out)
            facts[name] = json.loads((out / name / "manifest.json").read_text())
            console.print(f"{out / name}: {len(facts[name]['programs'])} programs", markup=False, soft_wrap=True)
        if report:
            with writing(report):
                report.write_text(json.dumps(facts, indent=1) + "\n")
    except (ValueError, RuntimeError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _setup(model: str, recipe: str | None, target: str, shapes: dict[str, Any]) -> Setup:
    # Imported here so that --help and mistakes in the arguments do not wait for JAX.
    from ninfer_jax import config
    from ninfer_jax.checkpoints import Artifact, is_artifact
    from ninfer_jax.engine.weights_in import stored_recipe
    from ninfer_jax.programs.setup import model_of, resolve
    from pallas_kernels import targets

    engine = config.EngineConfig(**shapes)
    if target != "cpu":
        targets.get(target)
    geometry, named = model_of(model)
    chosen = config.recipe(recipe) if recipe else None
    if is_artifact(model) and target != "cpu":
        if recipe:
            raise ValueError(f"--recipe {recipe}: {model} is an artifact, its weights have formats of their own")
        chosen = stored_recipe(Artifact.open(model))
    return resolve(geometry, named, engine, "cpu" if target == "cpu" else "cuda", chosen)


def _compile(console: Console, setup: Setup, target: str, out: Path) -> Plan:
    from ninfer_jax.programs.executables import compile_to
    from ninfer_jax.programs.plan import make_plan

    if target != "cpu":
        from pallas_kernels import deviceless

        deviceless.require_tools()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    with bar:
        task = bar.add_task("compiling", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name:14s}", completed=done, total=total)

        facts = compile_to(out, setup, target, progress=show)
    return make_plan(setup, target, _card_bytes(target), facts)


def _card_bytes(target: str) -> int:
    if target == "cpu":
        import jax

        from ninfer_jax.engine.memory import free_bytes

        return free_bytes(jax.devices("cpu")[0]) or 0
    from pallas_kernels import targets

    return targets.get(target).memory_bytes


def _show(console: Console, made: Plan, setup: Setup) -> None:
    shape = setup.shape
    pool = f"{(shape.pages - 1) * 64:,} tokens"
    title = f"{made.target}: context {shape.context:,}, kv {shape.kv}, draft {shape.draft}, slots {shape.slots}, pool {pool}"
    table = Table(title=title, title_justify="left")
    for column, justify in (("what", "left"), ("bytes", "right"), ("GiB", "right"), ("how known", "left")):
        table.add_column(column, justify=justify)

    def row(what: str, count: int, how: str) -> None:
        table.add_row(what, f"{count:,}", f"{count / 2**30:.3f}", how)

    for role, count in made.weights.items():
        row(f"weights: {role}", count, "array shapes")
    row("KV pages", made.kv, "array shapes")
    row("states, slots, sampling", made.state, "array shapes")
    for name, count in made.workspace.items():
        row(f"workspace: {name}" + (" (counts)" if count == max(made.workspace.values()) else ""), count, "compiled")
    row("executables", made.executables, "compiled")
    row("CUDA context", made.allowance, "allowance")
    table.add_section()
    row("total", made.total, "")
    row("card", made.card, "data sheet" if made.target != "cpu" else "free now")
    row("slack", made.slack, "")
    console.print(table)
    fitting = ", ".join(f"{format} {tokens:,}" for format, tokens in made.max_context.items())
    console.print(f"largest context a slot that would fit, by KV format: {fitting}", soft_wrap=True)


def _advice(made: Plan) -> str:
    fits = {format: tokens for format, tokens in made.max_context.items() if tokens > 0}
    options = ", ".join(f"{format} {tokens:,}" for format, tokens in fits.items())
    hint = (
        f"contexts that would fit: {options}"
        if fits
        else "even without pages it does not fit: take smaller weights (--recipe q4) or a larger card"
    )
    return f"does not fit: {made.total:,} bytes are needed, {made.target} has {made.card:,}; {hint}"
