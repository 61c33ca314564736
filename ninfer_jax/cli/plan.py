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

from ninfer_jax.cli import common
from ninfer_jax.config import PAGE
from ninfer_jax.files import new_directory, new_file

if TYPE_CHECKING:
    from ninfer_jax.programs.card import Compilation
    from ninfer_jax.programs.plan import Plan
    from ninfer_jax.programs.setup import Setup

_Option = typer.Option
OVER_BUDGET = 3

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PRESET", help=f"A model (see `generate`), of which config and tokenizer do, or {common.PRESET_NAMES}."
    ),
]
Recipe = Annotated[str | None, _Option(help=f"Formats of the weights: {common.RECIPE_NAMES}; default: as the model has them.")]


def plan(
    model: Model,
    recipe: Recipe = None,
    target: Annotated[str, _Option(help="The card, or cpu.")] = "rtx4090",
    context: common.Context = None,
    kv: common.Kv = None,
    draft: common.Draft = 0,
    drafter: common.Drafter = "mtp",
    slots: common.Slots = 1,
    pool: common.Pool = None,
    prefill_chunk: common.Chunk = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    no_tokenizer: common.NoTokenizer = False,
    prefix_cache: common.PrefixCache = "exact",
    cache_bytes: common.CacheBytes = None,
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile for a card that need not be here and say where every byte goes. Exit 3 if it does not fit, without compiling
    if weights, pages and states alone do not."""
    console = common.stderr_console()
    shapes = _shapes(context, kv, draft, drafter, slots, pool, prefill_chunk, dtype, kernels, no_tokenizer)
    with common.one_line_errors(console, also=(RuntimeError,)):
        from ninfer_jax.programs.plan import make_plan

        setup = _setup(model, recipe, target, shapes)
        card = _card_bytes(target)
        kept = _kept(setup, target, card, prefix_cache, cache_bytes)
        made = make_plan(setup, target, card, kept=kept)
        if not _hopeless(made):
            _start_compiler(target)
            with tempfile.TemporaryDirectory() as folder:
                made = make_plan(setup, target, made.card, _compile(console, setup, target, Path(folder)), kept)
    if as_json:
        print(json.dumps(made.json()))
    else:
        _show(Console(highlight=False), made, setup)
    if not made.fits:
        console.print(_advice(made), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(OVER_BUDGET)


def compile_programs(
    model: Model,
    out: Annotated[Path, common.path_option("Directory for the executables.", metavar="DIRECTORY")],
    target: Annotated[str, _Option(help="Cards by commas, or cpu: rtx4090,h200.")] = "rtx4090",
    recipe: Recipe = None,
    context: common.Context = None,
    kv: common.Kv = None,
    draft: common.Draft = 0,
    drafter: common.Drafter = "mtp",
    slots: common.Slots = 1,
    pool: common.Pool = None,
    prefill_chunk: common.Chunk = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    no_tokenizer: common.NoTokenizer = False,
    report: Annotated[Path | None, common.path_option("Write the compiled facts as JSON.")] = None,
) -> None:
    """Compile all programs of a configuration and write them for `generate --programs`."""
    console = common.stderr_console()
    shapes = _shapes(context, kv, draft, drafter, slots, pool, prefill_chunk, dtype, kernels, no_tokenizer)
    facts = {}
    with common.one_line_errors(console, also=(RuntimeError,)):
        from ninfer_jax.programs.executables import check_place, writing
        from ninfer_jax.programs.plan import make_plan

        # Mistakes should not wait for minutes of compiling.
        names = [name.strip() for name in target.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--target is {target!r}: name a card or cpu")
        setups = {name: _setup(model, recipe, name, shapes) for name in names}
        new_directory(out, label="--out ")
        if report is not None:
            new_file(report, label="--report ")
        for name in names:
            _start_compiler(name)
        for name, setup in setups.items():
            # The memory of the CPU that will run them may be another's.
            if name != "cpu" and _hopeless(made := make_plan(setup, name, _card_bytes(name))):
                raise ValueError(_advice(made))
        for name in names:
            check_place(out, name)
        for name, setup in setups.items():
            _compile(console, setup, name, out)
            facts[name] = json.loads((out / name / "manifest.json").read_text())
            console.print(f"{out / name}: {len(facts[name]['programs'])} programs", markup=False, soft_wrap=True)
        if report:
            with writing(report):
                report.write_text(json.dumps(facts, indent=1) + "\n")


def _shapes(
    context: int | None,
    kv: str | None,
    draft: int,
    drafter: str,
    slots: int,
    pool: int | None,
    prefill_chunk: int | None,
    dtype: str,
    kernels: str,
    no_tokenizer: bool,
) -> dict[str, Any]:
    """The arguments of `EngineConfig`."""
    sizes = {"context": context, "draft": draft, "slots": slots, "pool": pool, "prefill_chunk": prefill_chunk}
    return sizes | {"drafter": drafter, "kv": kv, "dtype": dtype, "kernels": kernels, "tokenizer": None if no_tokenizer else "auto"}


def _setup(model: str, recipe: str | None, target: str, shapes: dict[str, Any]) -> Setup:
    # Imported here so that --help and mistakes in the arguments do not wait for JAX.
    from ninfer_jax import config
    from ninfer_jax.checkpoints import Artifact, is_artifact
    from ninfer_jax.engine.weights_in import stored_recipe
    from ninfer_jax.programs.setup import model_of, resolve, shapes_in
    from pallas_kernels import targets

    engine = config.EngineConfig(**shapes)
    if target != "cpu":
        targets.get(target)
    place = shapes_in(model)
    geometry, named = model_of(place, engine.tokenizer)
    chosen = config.recipe(recipe) if recipe else None
    if isinstance(place, Path) and is_artifact(place):
        if recipe:
            raise ValueError(f"--recipe {recipe}: {model} is an artifact, its weights have formats of their own")
        chosen = stored_recipe(Artifact.open(place))
    setup = resolve(geometry, named, engine, "cpu" if target == "cpu" else "cuda", chosen)
    if recipe and setup.recipe is None:
        raise ValueError(f"--recipe {recipe}: XLA's operations on a CPU have their weights expanded to --dtype; leave it out")
    return setup


def _kept(setup: Setup, target: str, free: int, prefix_cache: str, cache_bytes: int | None) -> int:
    """Host memory for prefixes; ValueError where it holds none. Whose memory is not here may take the most."""
    from ninfer_jax.config import EngineConfig
    from ninfer_jax.engine.prefix_settings import budget_of, check_budget, mode_of

    config = EngineConfig(prefix_cache=prefix_cache, cache_bytes=cache_bytes)
    if mode_of(config, many=True) == "off":
        return 0
    programs, budget = setup.programs(), budget_of(config, free if target == "cpu" else None)
    check_budget(budget, programs.staging_bytes, programs.page_bytes, programs.chunk)
    return budget


def _hopeless(made: Plan) -> bool:
    """Nothing that a compiler says could make it fit."""
    return made.resident + made.allowance > made.card


def _start_compiler(target: str) -> None:
    """Before anything else of JAX: where no driver is, it would complain of that on the way."""
    if target != "cpu":
        from pallas_kernels import deviceless

        deviceless.start(target)


def _compile(console: Console, setup: Setup, target: str, out: Path) -> dict[str, tuple[Compilation, int]]:
    from ninfer_jax.programs.executables import compile_to

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    with bar:
        task = bar.add_task("compiling", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name:14s}", completed=done, total=total)

        return compile_to(out, setup, target, progress=show)


def _card_bytes(target: str) -> int:
    if target == "cpu":
        import jax

        from ninfer_jax.engine.memory import free_bytes

        if (free := free_bytes(jax.devices("cpu")[0])) is None:
            raise ValueError("cpu: nothing tells how much memory is free (/proc/meminfo); plan for a card instead")
        return free
    from pallas_kernels import targets

    return targets.get(target).memory_bytes


def _show(console: Console, made: Plan, setup: Setup) -> None:
    from ninfer_jax.programs.plan import ALLOWED

    shape = setup.shape
    pool = f"{shape.pool_tokens:,} tokens"
    title = f"{made.target}: context {shape.context:,}, kv {shape.kv}, draft {shape.draft}, slots {shape.slots}, pool {pool}"
    if shape.lookup:
        title += f", drafter {shape.drafter}"
    if made.target == "cpu":
        title += f", kernels {setup.kernels}"
    table = Table(title=title, title_justify="left")
    for column in ("what", "bytes", "GiB", "how known"):
        table.add_column(column, justify="right" if column in ("bytes", "GiB") else "left")

    def row(what: str, count: int, how: str) -> None:
        table.add_row(what, f"{count:,}", f"{count / 2**30:.3f}", how)

    for role, count in made.weights.items():
        row(f"weights: {role}", count, "array shapes")
    row("KV pages", made.kv, "array shapes")
    row("states, slots, sampling", made.state, "array shapes")
    row("one slot's state on its way", made.staging, "array shapes")
    how = "allowance" if ALLOWED in made.workspace else "compiled"
    for name, count in made.workspace.items():
        counts = " (counts)" if how == "compiled" and count == max(made.workspace.values()) else ""
        row("workspace" if how == "allowance" else f"workspace: {name}{counts}", count, how)
    if how == "compiled":
        row("executables", made.executables, how)
    row("CUDA context", made.allowance, "allowance")
    table.add_section()
    row("total", made.total, "")
    row("card", made.card, "data sheet" if made.target != "cpu" else "free now")
    row("slack", made.slack, "")
    console.print(table)
    fitting = ", ".join(f"{format} {tokens:,}" for format, tokens in made.max_context.items())
    console.print(f"largest context a slot that would fit, by KV format: {fitting}", soft_wrap=True)
    if made.kept:
        pages = max(0, made.kept - made.staging) // made.page * PAGE
        console.print(
            f"host memory for kept prefixes: at most {made.kept:,} bytes ({made.kept / 2**30:.3f} GiB): a checkpoint takes "
            f"{made.staging:,} and {made.page:,} for each {PAGE} tokens before it; so {made.kept // (made.staging + made.page):,} "
            f"short ones, or one of {pages:,} tokens",
            soft_wrap=True,
        )


def _advice(made: Plan) -> str:
    fits = {format: tokens for format, tokens in made.max_context.items() if tokens > 0}
    options = ", ".join(f"{format} {tokens:,}" for format, tokens in fits.items())
    hint = (
        f"contexts that would fit: {options}"
        if fits
        else "even without pages it does not fit: take smaller weights (--recipe q4) or a larger card"
    )
    return f"does not fit: {made.total:,} bytes are needed, {made.target} has {made.card:,}; {hint}"
