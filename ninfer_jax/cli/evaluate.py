"""`ninfer-jax eval`: how good a model's answers are in each KV format, on a text of yours."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ninfer_jax.cli import common
from ninfer_jax.cli.settings import with_profile
from ninfer_jax.config import EngineConfig
from ninfer_jax.config.engine import DRAFTERS
from ninfer_jax.files import new_directory, new_file, read_text
from ninfer_jax.models import checked
from ninfer_jax.tables import show

if TYPE_CHECKING:
    import numpy as np

    from ninfer_jax.engine import Engine

_Option = typer.Option


class Measure(StrEnum):
    ppl = "ppl"
    kld = "kld"
    needle = "needle"
    drift = "drift"
    acceptance = "acceptance"


_MEASURES = "ppl: loss. kld: divergence at decode width. needle: retrieval. drift: of the recurrent state. acceptance: of drafts."
# What each measure takes beside the options of all, with its defaults; an option that a measure does not take is refused.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppl": {"window": 2048, "stride": 1024, "tokens": None},
    "kld": {"reference": None, "against": None, "depths": "0,1024", "tokens": 512},
    "needle": {"lengths": "512,1024,2048", "depths": "0,0.25,0.5,0.75,1", "trials": 3, "seed": 0, "chat": False},
    "drift": {"reference": "float64", "tokens": 4096, "every": None},
    "acceptance": {"drafts": "1,2,3,4,5", "drafter": "mtp", "prompts": 16, "prompt_tokens": 200, "max_new": 128},
}


def evaluate(
    ctx: typer.Context,
    model: common.Model,
    measure: Annotated[Measure, typer.Argument(help=_MEASURES)],
    text: Annotated[Path, common.path_option("A UTF-8 text file to measure on.")],
    kv: Annotated[
        str | None, _Option(help=f"KV formats by commas: {common.KV_FORMATS}; default: bf16 on a GPU, f32 on a CPU.")
    ] = None,
    tokens: Annotated[int | None, _Option(min=1, help="ppl, drift: of the text (ppl: all). kld: decode steps a depth.")] = None,
    window: Annotated[int | None, _Option(min=1, help="ppl: tokens of a window.")] = None,
    stride: Annotated[int | None, _Option(min=1, help="ppl: new tokens a window.")] = None,
    reference: Annotated[str | None, _Option(help="kld: a format (default bf16). drift: float64 or decode.")] = None,
    against: Annotated[
        str | None, _Option(help="kld: another model directory to compare with, the checkpoint of an artifact for instance.")
    ] = None,
    depths: Annotated[str | None, _Option(help="kld: tokens before the steps. needle: places from 0 to 1.")] = None,
    lengths: Annotated[str | None, _Option(help="needle: tokens of the haystack.")] = None,
    trials: Annotated[int | None, _Option(min=1, help="needle: haystacks a length.")] = None,
    seed: Annotated[int | None, _Option(min=0, help="needle: of keys, numbers and places in the text.")] = None,
    chat: Annotated[bool, _Option("--chat", help="needle: ask in messages instead of continuing the text.")] = False,
    every: Annotated[int | None, _Option(min=1, help="drift: tokens between two points; default: a prefill call's.")] = None,
    drafts: Annotated[str | None, _Option(help="acceptance: values of K.")] = None,
    drafter: Annotated[str | None, _Option(help=f"acceptance: who drafts, of {', '.join(DRAFTERS)}.")] = None,
    prompts: Annotated[int | None, _Option(min=1, help="acceptance: continuations.")] = None,
    prompt_tokens: Annotated[int | None, _Option(min=1, help="acceptance: tokens before each.")] = None,
    max_new: Annotated[int | None, _Option(min=1, help="acceptance: tokens of each.")] = None,
    prefill_chunk: common.Chunk = None,
    profile: common.Profile = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    no_verify: common.NoVerify = False,
    as_json: Annotated[Path | None, common.path_option("Write all figures to this file.", "--json")] = None,
    plot: Annotated[Path | None, common.path_option("Write a picture into this directory.", metavar="DIRECTORY")] = None,
) -> None:
    """Measure a model on a text: loss, divergence by KV format, needles, drift of its state, accepted drafts."""
    console = common.stderr_console()
    given = dict(
        tokens=tokens,
        window=window,
        stride=stride,
        reference=reference,
        against=against,
        depths=depths,
        lengths=lengths,
        trials=trials,
        seed=seed,
        chat=chat or None,
        every=every,
        drafts=drafts,
        drafter=drafter,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        max_new=max_new,
    )
    with common.one_line_errors(console, context=ctx):
        options = _options(measure.value, given)
        shapes = {"kv": kv, "prefill_chunk": prefill_chunk, "dtype": dtype, "kernels": kernels}
        shapes = with_profile(ctx, profile, shapes)
        kv = shapes.pop("kv")
        formats: list[str | None] = [name.strip() for name in kv.split(",")] if kv else [None]
        checked(model)
        if against:
            checked(against)  # a mistake should not wait for an engine
        if as_json is not None:
            new_file(as_json, label="--json ")
        if plot is not None:
            new_directory(plot, label="--plot ")
        content = read_text(text, label="--text ")
        job = Job(console, _ready(console, model), content, formats, shapes, not no_verify)
        rows = MEASURES[measure.value](job, options, plot)
        about = {
            "measure": measure.value,
            "model": model,
            "device": job.device,
            "text": str(text),
            "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
            "options": options,
            "results": rows,
        }
        if as_json:
            as_json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    _show(Console(highlight=False), f"{model}, {measure.value} on {text.name} ({job.device})", rows, SHOWN[measure.value])


def _ready(console: Console, model: str, recipe: str | None = None) -> Path:
    """The directory to load for MODEL, which is fetched and converted if need be."""
    from ninfer_jax.engine.prepared import prepared

    with common.stages(console) as show:
        return prepared(model, recipe, say=common.teller(console), tell=show)


def _options(measure: str, given: dict[str, Any]) -> dict[str, Any]:
    """The measure's settings; ValueError for an option that belongs to another, and for lists that are no lists."""
    known = DEFAULTS[measure]
    for name, value in given.items():
        if value is not None and name not in known:
            goes = ", ".join(m for m, takes in DEFAULTS.items() if name in takes)
            raise ValueError(f"--{name.replace('_', '-')} goes with {goes}, not with {measure}")
    options = {name: default if given[name] is None else given[name] for name, default in known.items()}
    for name, kind in (("depths", float if measure == "needle" else int), ("lengths", int), ("drafts", int)):
        if name in options:
            options[name] = _numbers(name, options[name], kind)
    if measure == "needle" and not all(0 <= d <= 1 for d in options["depths"]):
        raise ValueError(f"--depths {options['depths']}: a needle's place is from 0 (beginning) to 1 (end)")
    if measure == "acceptance" and not all(1 <= k <= 5 for k in options["drafts"]):
        raise ValueError(f"--drafts {options['drafts']}: K is from 1 to 5")
    if measure == "acceptance":
        EngineConfig(draft=1, drafter=options["drafter"])  # a name that no engine takes
        if options["drafter"] == "none":
            raise ValueError("--drafter none: nothing is drafted that could be accepted")
    return options


def _numbers(name: str, text: str, kind: type) -> list:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        example = "0,0.5,1" if kind is float else "1,2,3"
        raise ValueError(f"--{name} {text!r}: give numbers by commas, for instance {example}") from None
    if any(n < 0 for n in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"--{name} {text!r}: no negative numbers and none twice")
    return numbers


class Job:
    """The common ground of all measures: engines one at a time, so that one card is enough, and the text in tokens."""

    def __init__(self, console: Console, path: Path, text: str, formats: list[str | None], shapes: dict[str, Any], verify: bool):
        from ninfer_jax.engine import allocator
        from pallas_kernels.kv_codecs import check_format

        allocator.reserve(None)  # before JAX starts: engines of several sizes follow one another

        for kv in formats:
            if kv is not None:  # before the first engine loads, not when its turn comes
                check_format(kv)
        self.console, self.text, self.formats = console, text, formats
        self.path = path
        self._shapes = shapes
        self._verify, self.device = verify, ""

    def load(self, kv: str | None, context: int, draft: int = 0, drafter: str = "mtp", path: Path | None = None) -> Engine:
        """path: of another model than the one that is measured."""
        from ninfer_jax.engine import Engine

        gc.collect()  # the engine before is part of a cycle; a card has no room for both
        config = EngineConfig(context=context, kv=kv, draft=draft, drafter=drafter, slots=1, **self._shapes)
        with self.progress(f"loading, kv {kv or 'auto'}, draft {draft}") as tell:
            engine = Engine.load(
                path or self.path, config, verify=self._verify, progress=lambda stage, done, total: tell(done, total)
            )
        self.device = engine.device
        return engine

    def ids(self, engine: Engine) -> list[int]:
        return engine.tokenizer.encode(self.text)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _ppl(job: Job, options: dict[str, Any], plot: Path | None) -> list[dict]:
    from ninfer_jax.evaluate import perplexity, plots

    losses = []
    for kv in job.formats:
        engine = job.load(kv, options["window"])
        with job.progress(f"scoring, kv {kv or 'auto'}") as tell:
            ids = job.ids(engine)[: options["tokens"]]
            losses.append(perplexity.text_loss(engine, ids, options["window"], options["stride"], tell))
        del engine
    if plot:
        plots.plot_losses(plot / "ppl.png", losses)
    return [dataclasses.asdict(loss) for loss in losses]


def _kld(job: Job, options: dict[str, Any], plot: Path | None) -> list[dict]:
    from ninfer_jax.evaluate import divergence, plots
    from pallas_kernels.kv_codecs import check_format

    depths, tokens, against = options["depths"], options["tokens"], options["against"]
    options["reference"] = check_format(options["reference"] or "bf16")
    # Against another model its own format is worth comparing too, and is what is compared where none is given.
    others = [kv for kv in job.formats if kv and (against or kv != options["reference"])] or (
        [options["reference"]] if against else []
    )
    if not others:
        raise ValueError(f"kld: give the formats to compare with {options['reference']} as --kv, for instance --kv int8,rk4v4-e8")

    def distributions(kv: str, path: Path | None = None) -> tuple[list[int], list[np.ndarray]]:
        engine = job.load(kv, max(depths) + tokens, path=path)
        ids = job.ids(engine)
        with job.progress(f"decode steps, kv {kv}{f' of {path}' if path else ''}") as tell:
            return ids, divergence.decode_logprobs(engine, ids, depths, tokens, tell)

    ids, expected = distributions(options["reference"], _ready(job.console, against, "none") if against else None)
    results = []
    for kv in others:
        own_ids, found = distributions(kv)
        if own_ids != ids:
            raise ValueError(
                f"--against {against}: its tokenizer makes other ids of the text, so its distributions are of other tokens"
            )
        for depth, reference, own in zip(depths, expected, found, strict=True):
            results.append(divergence.compare(kv, depth, reference, own, ids[depth + 1 : depth + 1 + tokens]))
    if plot:
        plots.plot_divergences(plot / "kld.png", results, options["reference"])
    return [dataclasses.asdict(result) for result in results]


def _needle(job: Job, options: dict[str, Any], plot: Path | None) -> list[dict]:
    from ninfer_jax.evaluate import needle, plots

    grids = {}
    for kv in job.formats:
        engine = job.load(kv, max(options["lengths"]) + 64 + (256 if options["chat"] else 0))
        with job.progress(f"questions, kv {kv or 'auto'}") as tell:
            asked = options["lengths"], options["depths"], options["trials"], options["seed"], options["chat"]
            grids[engine.programs.shape.kv] = needle.needle_grid(engine, job.ids(engine), *asked, tell)
        del engine
    if plot:
        plots.plot_needles(plot / "needle.png", grids)
    return [{"kv": kv, **dataclasses.asdict(cell)} for kv, cells in grids.items() for cell in cells]


def _drift(job: Job, options: dict[str, Any], plot: Path | None) -> list[dict]:
    from ninfer_jax.evaluate import drift, plots

    if len(job.formats) > 1:
        raise ValueError("drift: give one format as --kv")
    engine = job.load(job.formats[0], options["tokens"])
    options["every"] = options["every"] or engine.programs.chunk
    with job.progress("reading") as tell:
        points = drift.state_drift(engine, job.ids(engine), options["tokens"], options["every"], options["reference"], tell)
    if plot:
        plots.plot_drift(plot / "drift.png", points)
    return [dataclasses.asdict(point) for point in points]


def _acceptance(job: Job, options: dict[str, Any], plot: Path | None) -> list[dict]:
    from ninfer_jax.evaluate import acceptance, plots

    results = []
    for kv in job.formats:
        for draft in options["drafts"]:
            engine = job.load(kv, options["prompt_tokens"] + options["max_new"], draft, options["drafter"])
            prompts = acceptance.cut_prompts(job.ids(engine), options["prompts"], options["prompt_tokens"])
            with job.progress(f"continuations, kv {kv or 'auto'}, draft {draft}") as tell:
                results.append(acceptance.draft_acceptance(engine, prompts, options["max_new"], tell))
            del engine
    if plot:
        plots.plot_acceptance(plot / "acceptance.png", results)
    return [dataclasses.asdict(result) for result in results]


MEASURES: dict[str, Callable[[Job, dict[str, Any], Path | None], list[dict]]] = {
    "ppl": _ppl,
    "kld": _kld,
    "needle": _needle,
    "drift": _drift,
    "acceptance": _acceptance,
}


# What the table has of each measure; --json has everything.
SHOWN: dict[str, tuple[str, ...]] = {
    "ppl": ("kv", "tokens", "nats_per_token", "nats_per_byte", "perplexity"),
    "kld": ("kv", "depth", "tokens", "kl", "kl_error", "kl_p99", "same_top", "loss"),
    "needle": ("kv", "length", "depth", "asked", "found", "answer_nats", "blind_nats"),
    "drift": ("path", "position", "state_error", "logits_error", "kl"),
    "acceptance": ("kv", "drafter", "draft", "rounds", "accepted", "accepted_share", "tokens_per_round", "by_place"),
}


def _show(console: Console, title: str, rows: list[dict], columns: tuple[str, ...]) -> None:
    """The figures as a table on stdout; of the layers' state errors the largest."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column("worst state error" if name == "state_error" else name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(max(row[name]) if name == "state_error" else row[name]) for name in columns))
    show(console, table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{x:.2f}" for x in value)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
