"""`ninfer-jax plan` and `ninfer-jax compile`: what a configuration takes on a card, and its programs as files."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ninfer_jax.cli import common, show_plan
from ninfer_jax.cli.settings import tell_choice, tell_commands, typed, with_profile
from ninfer_jax.config import EngineConfig
from ninfer_jax.files import new_directory, new_file
from ninfer_jax.planning.budget import CONTEXT_ALLOWANCE, Place, card, card_here
from ninfer_jax.planning.choose import Choice, choose
from ninfer_jax.planning.host_memory import host_bytes
from ninfer_jax.planning.kept import budget_of, check_budget, mode_of
from ninfer_jax.planning.known import Known, known_of
from ninfer_jax.planning.nearest import nearest, refusal
from ninfer_jax.planning.plan import Plan, quick_plan
from ninfer_jax.planning.profiles import profiles

if TYPE_CHECKING:
    from ninfer_jax.programs.card import Compilation
    from ninfer_jax.programs.setup import Setup

_Option = typer.Option
OVER_BUDGET = 3
LARGER = "free more of it, take smaller weights (--recipe q4, or `ninfer-jax convert MODEL DST`) or a larger card"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PRESET", help=f"A model (see `generate`), of which config and tokenizer do, or {common.PRESET_NAMES}."
    ),
]
Recipe = Annotated[
    str | None,
    _Option(
        help=f"Formats of the weights: {common.RECIPE_NAMES}, none (as the model has them) or auto.",
        show_default="auto for a preset, and on a card for a checkpoint; else none",
    ),
]
Free = Annotated[float | None, _Option(help="GiB of the card that nobody holds; default: what a card says that is here, else all.")]


def plan(
    ctx: typer.Context,
    model: Model,
    recipe: Recipe = None,
    target: Annotated[str | None, _Option(help="The card, or cpu.", show_default="the card that is here, else rtx4090")] = None,
    free: Free = None,
    profile: common.Profile = None,
    context: common.Context = None,
    kv: common.Kv = None,
    draft: common.Draft = None,
    drafter: common.Drafter = "mtp",
    slots: common.Slots = None,
    pool: common.Pool = None,
    prefill_chunk: common.Chunk = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    no_tokenizer: common.NoTokenizer = False,
    prefix_cache: common.PrefixCache = "exact",
    cache_bytes: common.CacheBytes = None,
    compare: Annotated[
        list[str] | None,
        _Option(help="Another configuration beside it: a profile, or kv=int8,slots=4; may be given several times."),
    ] = None,
    compiled: Annotated[
        bool, _Option("--compiled", help="Compile the programs (minutes) for the figures that only a compiler has.")
    ] = False,
    plot: Annotated[Path | None, common.path_option("Write the picture as a PNG.")] = None,
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say where every byte of a device goes, which need not be here. Exit 3 if it does not fit."""
    console = common.stderr_console()
    with common.one_line_errors(console, also=(RuntimeError,), context=ctx):
        if plot is not None:
            new_file(plot, label="--plot ")
        given: dict[str, Any] = {"context": context, "kv": kv, "draft": draft, "drafter": drafter, "slots": slots, "pool": pool}
        given |= {
            "prefill_chunk": prefill_chunk,
            "dtype": dtype,
            "kernels": kernels,
            "recipe": recipe,
            "prefix_cache": prefix_cache,
        }
        given = with_profile(ctx, profile, given)
        place = place_of(target, free)
        with common.stages(console) as show:
            known = known_of(model, common.teller(console), show)
        if compiled and compare:
            raise ValueError("--compare goes without --compiled: compile one configuration at a time")
        made, choice, config = _planned(known, given, place, no_tokenizer, cache_bytes)
        beside = [
            (words, _planned(known, _compared(words, given, ctx), place, no_tokenizer, cache_bytes)[0]) for words in compare or ()
        ]
        if compiled and choice.budget.resident <= (place.free or 0):
            made = _compiled_plan(console, known, choice, place, made)
    if as_json:
        content = made.json() | choice.json()
        print(json.dumps(content | ({"compared": {words: other.json() for words, other in beside}} if beside else {})))
    else:
        out = Console(highlight=False, emoji=False)
        show_plan.show(out, made, choice) if not beside else show_plan.compare(out, [("asked", made), *beside])
    tell_choice(console, choice)
    if plot is not None:
        show_plan.picture(plot, [("asked" if beside else show_plan.title(made, choice), made), *beside])
        console.print(str(plot), markup=False, soft_wrap=True)
    if not made.fits:
        console.print(_advice(made), style="bold red", markup=False, soft_wrap=True)
        changes = nearest(
            known.model,
            config,
            place,
            known.asked(given["recipe"], place.platform),
            drafts=known.drafts,
            recipe_is_open=known.recipe is None and not (place.platform == "cpu" and config.kernels == "xla"),
            need_less=max(0, made.total - made.allowance - choice.budget.total),
        )
        tell_commands(console, ctx, changes)
        raise typer.Exit(OVER_BUDGET)


def _planned(
    known: Known, given: dict[str, Any], place: Place, no_tokenizer: bool, cache_bytes: int | None
) -> tuple[Plan, Choice, EngineConfig]:
    """The plan of a configuration, what was chosen of it, and what was asked for."""
    fields = {name: value for name, value in given.items() if name != "recipe"}
    config = EngineConfig(**fields, tokenizer=None if no_tokenizer else "auto", cache_bytes=cache_bytes)
    recipe = known.asked(given["recipe"], place.platform)
    if place.platform == "cpu" and config.kernels == "xla" and given["recipe"] not in (None, "none", "auto"):
        raise ValueError(
            f"--recipe {given['recipe']}: XLA's operations on a CPU have their weights expanded to --dtype; leave it out"
        )
    choice = choose(known.model, config, place, recipe, known.drafts)
    kept = 0
    if mode_of(config, many=True) != "off":
        kept = budget_of(config, place.free if place.platform == "cpu" else None)
    taken = 0 if place.platform == "cpu" else place.total - (place.free or 0) - CONTEXT_ALLOWANCE
    made = quick_plan(known.model, choice, kept, max(0, taken))
    if kept:
        check_budget(kept, made.staging, made.page, choice.budget.shape.prefill_chunk)
    return made, choice, config


def _compared(words: str, given: dict[str, Any], ctx: typer.Context) -> dict[str, Any]:
    """The settings of a `--compare`: a profile by its name, or fields and values by commas, over what the command says."""
    known = profiles()
    if words in known:
        more = dict(known[words].settings) | ({"recipe": known[words].recipe} if known[words].recipe else {})
        return given | {name: value for name, value in more.items() if name in given and not typed(ctx, name)}
    more = {}
    for part in words.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in given:
            raise ValueError(f"--compare {words!r}: give a profile ({', '.join(known)}) or {', '.join(given)} like kv=int8,slots=4")
        more[name] = int(value) if value.isdecimal() else value
    return given | more


def _compiled_plan(console: Console, known: Known, choice: Choice, place: Place, made: Plan) -> Plan:
    """The same plan, with what the compiler says."""
    from ninfer_jax.programs.plan import make_plan

    setup = _setup(known, choice)
    _start_compiler(place.name)
    with tempfile.TemporaryDirectory() as folder:
        found = make_plan(setup, place.name, made.card, _compile(console, setup, place.name, Path(folder)), made.kept)
    from ninfer_jax.planning.plan import with_contexts

    return with_contexts(dataclasses.replace(found, taken=made.taken), setup.model, choice.budget.shape)


def compile_programs(
    ctx: typer.Context,
    model: Model,
    out: Annotated[Path, common.path_option("Directory for the executables.", metavar="DIRECTORY")],
    target: Annotated[
        str | None, _Option(help="Cards by commas, or cpu: rtx4090,h200.", show_default="the card that is here, else rtx4090")
    ] = None,
    recipe: Recipe = None,
    free: Free = None,
    profile: common.Profile = None,
    context: common.Context = None,
    kv: common.Kv = None,
    draft: common.Draft = None,
    drafter: common.Drafter = "mtp",
    slots: common.Slots = None,
    pool: common.Pool = None,
    prefill_chunk: common.Chunk = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    no_tokenizer: common.NoTokenizer = False,
    report: Annotated[Path | None, common.path_option("Write the compiled facts as JSON.")] = None,
) -> None:
    """Compile all programs of a configuration and write them for `generate --programs`."""
    console = common.stderr_console()
    facts = {}
    with common.one_line_errors(console, also=(RuntimeError,), context=ctx):
        given: dict[str, Any] = {"context": context, "kv": kv, "draft": draft, "drafter": drafter, "slots": slots, "pool": pool}
        given |= {"prefill_chunk": prefill_chunk, "dtype": dtype, "kernels": kernels, "recipe": recipe}
        given = with_profile(ctx, profile, given)
        # Mistakes should not wait for minutes of compiling.
        names = [None] if target is None else [name.strip() for name in target.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--target is {target!r}: name a card or cpu")
        chosen: dict[str, Choice] = {}
        with common.stages(console) as show:
            known = known_of(model, common.teller(console), show)
        for place in (place_of(name, free) for name in names):
            _, chosen[place.name], config = _planned(known, given | {"prefix_cache": "off"}, place, no_tokenizer, None)
        names = list(chosen)
        new_directory(out, label="--out ")
        if report is not None:
            new_file(report, label="--report ")
        for name in names:
            _start_compiler(name)
        for name, choice in chosen.items():
            # The memory of the CPU that will run them may be another's.
            if name != "cpu" and not choice.fits:
                stored = known.asked(given["recipe"], choice.place.platform)
                raise refusal(
                    choice,
                    nearest(known.model, config, choice.place, stored, drafts=known.drafts, recipe_is_open=known.recipe is None),
                    LARGER,
                )
        from ninfer_jax.programs.executables import check_place, writing

        setups = {name: _setup(known, choice, no_tokenizer) for name, choice in chosen.items()}
        for name in names:
            check_place(out, name)
        for choice in chosen.values():
            tell_choice(console, choice)
        for name, setup in setups.items():
            _compile(console, setup, name, out)
            facts[name] = json.loads((out / name / "manifest.json").read_text())
            console.print(f"{out / name}: {len(facts[name]['programs'])} programs", markup=False, soft_wrap=True)
        if report:
            with writing(report):
                report.write_text(json.dumps(facts, indent=1) + "\n")


def place_of(target: str | None, free: float | None = None) -> Place:
    """The device of a plan: "cpu", a card by its name, None for the card that is here or else the RTX 4090. free: GiB that nobody
    holds of it. ValueError for a card that is not known."""
    if target == "cpu":
        there = host_bytes() if free is None else int(free * 2**30)
        if there is None:
            raise ValueError("cpu: nothing tells how much memory is free (/proc/meminfo); plan for a card instead")
        return Place("cpu", "cpu", there, there)
    here = card_here() if free is None else None
    if here is not None and target in (None, here.name):
        return here
    found = card(target or "rtx4090")
    if free is None:
        return found
    if not 0 <= free * 2**30 <= found.total:
        raise ValueError(f"--free is {free:g} GiB, {found.name} has {found.total / 2**30:.2f}")
    return card(found.name, found.total - int(free * 2**30))


def _setup(known: Known, choice: Choice, no_tokenizer: bool = False) -> Setup:
    """Imports JAX, which plans from arithmetic do without."""
    from ninfer_jax.programs.setup import model_of, resolve

    geometry, named = model_of(known.place, None if no_tokenizer else choice.config.tokenizer)
    return resolve(geometry, named, choice.config, choice.place.platform, choice.recipe)


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


def _advice(made: Plan) -> str:
    fits = {format: tokens for format, tokens in made.max_context.items() if tokens > 0}
    options = ", ".join(f"{format} {tokens:,}" for format, tokens in fits.items())
    hint = f"contexts that would fit: {options}" if fits else f"even without pages it does not fit: {LARGER}"
    there = made.card - made.taken
    return f"does not fit: {made.total:,} bytes are needed, {made.target} has {there:,}{' free' if made.taken else ''}; {hint}"
