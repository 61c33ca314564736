"""`ninfer-jax bench`: a matrix of measurements; the table goes to stdout, progress and reasons to stderr."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ninfer_jax.cli import common
from ninfer_jax.cli.settings import tell_choice, with_profile
from ninfer_jax.config import MAX_DRAFT, MAX_SLOTS, EngineConfig
from ninfer_jax.files import new_directory, new_file
from ninfer_jax.models import checked, short_name
from ninfer_jax.tables import show as show_table

if TYPE_CHECKING:
    from ninfer_jax.bench.results import Row
    from ninfer_jax.config import ModelConfig
    from ninfer_jax.planning.choose import Choice

_Option = typer.Option
_MANY = "several by commas"


def bench(
    ctx: typer.Context,
    model: common.Model,
    prompt: Annotated[str, _Option(help=f"Prompt tokens that are timed; {_MANY}.")] = "512",
    gen: Annotated[str, _Option(help=f"Tokens to generate, the prefill's own first one included; {_MANY}.")] = "128",
    depth: Annotated[
        str, _Option(help=f"Tokens filled before the prompt, untimed, multiples of the prefill chunk; {_MANY}.")
    ] = "0",
    kv: Annotated[str | None, _Option(help=f"KV formats {common.KV_FORMATS}; {_MANY}.", show_default="auto")] = None,
    draft: Annotated[str, _Option(help=f"K, tokens that are drafted a round, 0 to {MAX_DRAFT}; {_MANY}.")] = "auto",
    drafter: common.Drafter = "mtp",
    slots: Annotated[str, _Option(help=f"Sequences side by side, 1 to {MAX_SLOTS}; {_MANY}.")] = "auto",
    repeats: Annotated[int, _Option(help="Timed runs of a cell.")] = 5,
    warmup: Annotated[int, _Option(help="Untimed runs of a cell before.")] = 1,
    corpus: Annotated[
        Path | None, common.path_option("UTF-8 text to cut prompts from; default: the sources of Python's standard library.")
    ] = None,
    context: Annotated[
        str | None, _Option(help=f"Capacity of a slot; default: the largest need of an engine's cells; {_MANY}.")
    ] = None,
    prefill_chunk: common.Chunk = None,
    profile: common.Profile = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    no_verify: common.NoVerify = False,
    json_file: Annotated[Path | None, common.path_option("Keep the results here, written after every cell.", "--json")] = None,
    resume: Annotated[
        bool, _Option("--resume", help="Take from the --json file what it has with these settings and versions.")
    ] = False,
    csv_file: Annotated[Path | None, common.path_option("Write the table here too.", "--csv")] = None,
    plot: Annotated[
        Path | None,
        common.path_option("Directory for PNGs: speed by depth, acceptance by K, memory by context.", metavar="DIRECTORY"),
    ] = None,
    compare: Annotated[Path | None, common.path_option("An earlier --json file: print ratios to it, cell by cell.")] = None,
) -> None:
    """Measure prefill, decode, first token, drafts, memory and energy over every combination of the lists."""
    console = common.stderr_console()
    with common.one_line_errors(console, context=ctx):
        engine = {"kv": kv, "draft": draft, "slots": slots, "context": context}
        engine |= {"prefill_chunk": prefill_chunk, "dtype": dtype, "kernels": kernels, "drafter": drafter}
        engine = with_profile(ctx, profile, engine)
        given = {"prompt": prompt, "gen": gen, "depth": depth}
        lists: dict[str, list] = {name: _integers(name, text) for name, text in given.items()}
        for name in ("draft", "slots", "context"):
            text = "auto" if engine[name] is None else str(engine.pop(name, None))
            lists[name] = [None] if text == "auto" else _integers(name, text)
        kv = engine["kv"]
        checked(model)
        files = _Files(json_file, resume, csv_file, plot, compare)
        shapes = {"warmup": warmup, "repeats": repeats}
        shapes |= {name: engine[name] for name in ("prefill_chunk", "dtype", "kernels", "drafter")}
        most = max((k for k in lists["draft"] if k is not None), default=None)
        EngineConfig(draft=most, drafter=str(engine["drafter"]))  # a mistake should not wait for the corpus
        _run(console, model, lists, kv, shapes, corpus, files, not no_verify)


class _Files:
    """The files of a run, checked before anything is measured."""

    def __init__(self, json_file: Path | None, resume: bool, csv_file: Path | None, plot: Path | None, compare: Path | None):
        self.json, self.resume, self.csv, self.plot, self.compare = json_file, resume, csv_file, plot, compare
        if resume and json_file is None:
            raise ValueError("--resume needs --json FILE, the file to go on with")
        for option, path in (("--json", json_file), ("--csv", csv_file)):
            if path is not None:
                new_file(path, label=f"{option} ")
        if plot is not None:
            new_directory(plot, label="--plot ")
        if json_file and json_file.exists() and not resume:
            raise ValueError(f"--json {json_file} is there already; go on with it by --resume, or name another file")


def _run(
    console: Console,
    model: str,
    lists: dict[str, list],
    kv: str | None,
    shapes: dict,
    corpus_file: Path | None,
    files: _Files,
    verify: bool,
) -> None:
    # Imported here so that --help and mistakes in the arguments do not wait for JAX.
    import jax

    from ninfer_jax.bench import corpus, device, matrix, report
    from ninfer_jax.bench.results import Results, read_rows
    from ninfer_jax.bench.run import Bench, Settings, tokens_needed
    from ninfer_jax.config import ModelConfig
    from ninfer_jax.engine import Engine, allocator
    from ninfer_jax.engine.prepared import prepared
    from ninfer_jax.planning import sizes
    from ninfer_jax.programs.setup import resolve
    from ninfer_jax.text import Tokenizer

    with common.stages(console) as show:
        path = prepared(model, say=common.teller(console), tell=show)
    geometry, tokenizer = ModelConfig.from_hf(path), Tokenizer.from_dir(path)
    allocator.reserve(None)  # before the next line starts JAX: engines of several sizes follow one another
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    found = _chosen(path, geometry, lists, kv, shapes, platform)
    setup = resolve(geometry, tokenizer.vocab_size, found.config, platform, found.recipe)
    shapes["prefill_chunk"] = setup.chunk
    if platform == "cpu":
        shapes["kernels"] = setup.kernels  # rows of other kernels are no rows of these
    formats = _items("kv", kv) if kv not in (None, "auto") else [setup.shape.kv]
    for name in ("draft", "slots"):
        lists[name] = [getattr(found.config, name) if value is None else value for value in lists[name]]
    wanted = matrix.cells(
        prompts=lists["prompt"],
        gens=lists["gen"],
        depths=lists["depth"],
        kvs=formats,
        drafts=lists["draft"],
        slots=lists["slots"],
        contexts=lists["context"],
        chunk=setup.chunk,
    )
    groups = matrix.by_engine(wanted, lambda group: sizes.page(geometry, group.kv, group.draft > 0) * group.capacity * group.slots)
    settings = Settings(short_name(model), device.fingerprint(path), "", **shapes)
    old = read_rows(files.compare) if files.compare else []
    results = Results(files.json, read_rows(files.json) if files.json and files.resume and files.json.exists() else ())

    with _Progress(console, len(wanted)) as bar:
        need = tokens_needed(wanted, settings)
        text = corpus.open_corpus(tokenizer, corpus_file, need, lambda done, total: bar.tell("tokenising the corpus", done, total))
        settings = replace(settings, corpus=text.name)
        results.write()  # a place that cannot be written should not wait for the first cell
        tell_choice(console, found)

        def load(config: EngineConfig) -> Engine:
            words = f"context {config.context}, kv {config.kv}, K {config.draft}, drafter {config.drafter}, slots {config.slots}"
            return Engine.load(
                path, config, verify=verify, progress=lambda stage, done, total: bar.tell(f"engine ({words}): {stage}", done, total)
            )

        rows = Bench(settings, device.versions(), text, load, results, bar.tell, bar.row).run(groups)
    out = Console(highlight=False, emoji=False)
    show_table(out, report.table(rows))
    for line in report.refusals(rows):
        console.print(line, markup=False, soft_wrap=True)
    if files.compare:
        show_table(out, report.compare(rows, old, files.compare.name))
        for line in report.differences(rows, old):
            out.print(f"differs: {line}", markup=False, soft_wrap=True)
    _write(console, rows, files)
    if all(row.refused for row in rows):
        raise ValueError("every cell was refused")


def _chosen(path: Path, geometry: ModelConfig, lists: dict[str, list], kv: str | None, shapes: dict, platform: str) -> Choice:
    """A choice of formats, drafts and slots where the cells leave them open, as an engine of the model has it; contexts are what
    cells need."""
    import jax

    from ninfer_jax.engine.memory import free_bytes
    from ninfer_jax.planning.budget import Place
    from ninfer_jax.planning.choose import choose
    from ninfer_jax.planning.known import known_of

    def only(values: list) -> Any:
        return values[0] if len(values) == 1 else max(values)

    known, device = known_of(path), jax.devices()[0]
    fields = {name: only(lists[name]) for name in ("draft", "slots", "context")}
    fields["kv"] = kv if kv is None or "," not in kv else _items("kv", kv)[0]
    config = EngineConfig(**fields, **{name: shapes[name] for name in ("prefill_chunk", "dtype", "kernels", "drafter")})
    return choose(geometry, config, Place(platform, device.device_kind, free_bytes(device)), known.recipe, known.drafts)


def _write(console: Console, rows: list[Row], files: _Files) -> None:
    from ninfer_jax.bench import plots, report

    if files.csv:
        files.csv.write_text(report.to_csv(rows), "utf-8")
    if files.plot:
        files.plot.mkdir(parents=True, exist_ok=True)
        made, left_out = plots.write(rows, files.plot)
        for line in (*map(str, made), *left_out):
            console.print(line, markup=False, soft_wrap=True)


class _Progress:
    """Two bars that vanish when done: cells, and what is going on. Where stderr is no terminal, one line a finished cell."""

    def __init__(self, console: Console, cells: int):
        self._console, self._exits = console, ExitStack()
        words = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))  # figures do not give way
        columns = (words, BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._cells, self._stage = self._bar.add_task("cells", total=cells), self._bar.add_task("", total=None)
        self._name, self._done, self._of = "", 0, cells

    def __enter__(self) -> _Progress:
        self._exits.enter_context(self._bar)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def tell(self, stage: str, done: int, total: int) -> None:
        if stage != self._name:
            self._name = stage
            self._bar.reset(self._stage, description=stage)
        self._bar.update(self._stage, completed=done, total=total)

    def row(self, row: Row) -> None:
        self._done += 1
        self._bar.advance(self._cells)
        if not self._console.is_terminal:
            what = "refused" if row.refused else "measured"
            self._console.print(f"{self._done} of {self._of}: {row.cell}: {what}", markup=False, soft_wrap=True)


def _items(name: str, given: str) -> list[str]:
    items = [item.strip() for item in given.split(",")]
    if not all(items):
        raise ValueError(f"--{name} is {given!r}, it must be values separated by commas")
    return items


def _integers(name: str, given: str) -> list[int]:
    try:
        return [int(item) for item in _items(name, given)]
    except ValueError:
        raise ValueError(f"--{name} is {given!r}, it must be whole numbers separated by commas, like 512,1024") from None
