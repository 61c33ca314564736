"""`ninfer-jax generate`: one completion, streamed."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TaskProgressColumn, TextColumn

from ninfer_jax.cli import common
from ninfer_jax.cli.settings import tell_choice, with_profile
from ninfer_jax.files import chunks_of, decoded, directory, lone_surrogate, read_json
from ninfer_jax.models import checked, short_name

if TYPE_CHECKING:
    from ninfer_jax.engine import Completion, Engine
    from ninfer_jax.engine.requests import Requests

_Option = typer.Option


def generate(
    ctx: typer.Context,
    model: common.Model,
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="`-` reads the prompt from stdin.")] = None,
    prompt: Annotated[str | None, _Option(help="Raw text to continue.")] = None,
    messages: Annotated[Path | None, common.path_option("A JSON file: a list of chat messages.")] = None,
    tokens: Annotated[str | None, _Option(help="Token ids to continue, by commas.")] = None,
    max_new: Annotated[int, _Option(help="Tokens to generate at most.")] = 512,
    greedy: Annotated[bool, _Option("--greedy", help="Take the most likely token each time.")] = False,
    temperature: Annotated[float | None, _Option(help="Default: the checkpoint's own.")] = None,
    top_k: Annotated[int | None, _Option(help="Default: the checkpoint's own; 0 is off.")] = None,
    top_p: Annotated[float | None, _Option(help="Default: the checkpoint's own.")] = None,
    min_p: Annotated[float | None, _Option(help="Default: the checkpoint's own.")] = None,
    no_thinking: Annotated[bool, _Option("--no-thinking", help="With --messages: answer without reasoning.")] = False,
    profile: common.Profile = None,
    context: common.Context = None,
    kv: common.Kv = None,
    draft: common.Draft = None,
    drafter: common.Drafter = "mtp",
    slots: common.Slots = None,
    dtype: common.Dtype = "auto",
    kernels: common.Kernels = "auto",
    pool: common.Pool = None,
    prefill_chunk: common.Chunk = None,
    session: Annotated[
        Path | None, common.path_option("Go on with the conversation of this file, or begin it; the answer is added.")
    ] = None,
    prefix_cache: common.PrefixCache = "auto",
    cache_bytes: common.CacheBytes = None,
    cache_dir: common.CacheDir = None,
    cache_dir_bytes: common.CacheDirBytes = None,
    programs: Annotated[
        Path | None,
        common.path_option("Executables from `ninfer-jax compile`; only from a directory you trust.", metavar="DIRECTORY"),
    ] = None,
    recipe: common.Converted = None,
    no_program_cache: common.NoProgramCache = False,
    no_verify: common.NoVerify = False,
    no_tokenizer: common.NoTokenizer = False,
    seed: Annotated[int | None, _Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, _Option(help="A string that ends the answer; may be given several times.")] = None,
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Complete a prompt, or answer messages."""
    console = common.stderr_console()
    with common.one_line_errors(console, context=ctx):
        checked(model)  # a mistake should not wait for JAX
        if programs is not None:
            directory(programs, label="--programs ")
        given = _input(source, prompt, messages, tokens)
        if no_tokenizer and tokens is None:
            raise ValueError("--no-tokenizer goes with --tokens: without a tokenizer there is no text")
        if no_thinking and messages is None:
            raise ValueError("--no-thinking goes with --messages: raw text has no chat template")
        sampling = {
            "max_new_tokens": max_new,
            "temperature": 0.0 if greedy else temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": tuple(stop) if stop else None,
        }
        shapes = {
            "context": context,
            "kv": kv,
            "draft": draft,
            "drafter": drafter,
            "slots": slots,
            "dtype": dtype,
            "kernels": kernels,
            "pool": pool,
            "prefill_chunk": prefill_chunk,
            "tokenizer": None if no_tokenizer else "auto",
            "prefix_cache": prefix_cache,
            "program_cache": "off" if no_program_cache else "auto",
            **common.cache_settings(cache_bytes, cache_dir, cache_dir_bytes),
        }
        shapes = with_profile(ctx, profile, shapes)
        if session is not None and shapes["prefix_cache"] == "auto":
            shapes["prefix_cache"] = "exact"
        if session is not None and shapes["prefix_cache"] == "off":
            raise ValueError("--session needs the prefix cache, --prefix-cache is off: leave one of them out")
        options = {"enable_thinking": False} if no_thinking else {}
        given_sampling = {name: value for name, value in sampling.items() if value is not None}
        loading = {"programs": programs, "verify": not no_verify, "recipe": recipe}
        _run(console, model, given, as_json, options, given_sampling, shapes, loading, session)


def _run(
    console: Console,
    model: str,
    given: str | list,
    as_json: bool,
    options: dict[str, Any],
    sampling: dict[str, Any],
    shapes: dict[str, Any],
    loading: dict[str, Any],
    session: Path | None = None,
) -> None:
    # Imported here so that --help and mistakes in the arguments do not wait for JAX.
    from ninfer_jax.cli.session import Session
    from ninfer_jax.config import EngineConfig
    from ninfer_jax.decoding import SamplingParams

    config = EngineConfig(**shapes)
    SamplingParams(**sampling)  # a mistake should not wait for the weights

    def refuse(requests: Requests) -> None:
        """Whatever the engine would refuse once it is compiled."""
        whole = given if talk is None else talk.with_more(given, requests)
        requests.sequence(whole, requests.default_params(**sampling), options)

    talk = None if session is None else Session(session)
    engine = _load(console, model, config, loading | {"before": refuse})
    if talk is not None:
        talk.open(engine)
        given = talk.with_more(given, engine.requests)
    params = engine.default_params(**sampling)
    completion = _answer(console, engine, given, params, options, _header(short_name(model), engine), quiet=as_json)
    if as_json:
        print(json.dumps(_as_json(engine, completion), ensure_ascii=False))
    else:
        _statistics(console, engine, completion)
    engine.settle()
    engine.close()
    if talk is not None:
        talk.save(engine, given, completion)


def _input(source: str | None, prompt: str | None, messages: Path | None, tokens: str | None) -> str | list:
    """The prompt's text, its messages or its token ids, from exactly one of the four places."""
    if source not in (None, "-"):
        raise ValueError(f"unexpected argument {source!r}; give the prompt with --prompt, or - to read stdin")
    if sum(x is not None for x in (source, prompt, messages, tokens)) != 1:
        raise ValueError("give exactly one of --prompt TEXT, --messages FILE.json, --tokens IDS and -")
    if prompt is not None:
        if found := lone_surrogate(prompt):  # what Python makes of bytes that are not UTF-8
            raise ValueError(f"--prompt: {found}")
        return prompt
    if tokens is not None:
        return _ids(tokens)
    if messages is None:
        return decoded(chunks_of(sys.stdin.buffer), "stdin")
    parsed = read_json(messages)
    if not isinstance(parsed, list) or not parsed or not all(isinstance(m, dict) for m in parsed):
        raise ValueError(f"{messages}: must hold a list of messages, each an object with role and content")
    return parsed


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("--tokens: give token ids by commas, for instance 1,2,3") from None


def _load(console: Console, model: str, config: Any, loading: dict[str, Any]) -> Engine:
    from ninfer_jax.engine import Engine

    with _bar(console, TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            stage, _, what = stage.partition(": ")
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total, description=f"{stage:10s}" + (f" {what}" if what else ""))

        return Engine.load(model, config, **loading, progress=show, say=common.teller(console))


def _header(name: str, engine: Engine) -> str:
    shape = engine.programs.shape
    return (
        f"{name} on {engine.device} ({engine.programs.platform}), {shape.dtype}, context {shape.context}, "
        f"kv {shape.kv}, draft {shape.draft}, slots {shape.slots}"
        + (f", drafter {shape.drafter}" if shape.lookup else "")
        + (f", kernels {engine.programs.kernels or 'xla'}" if engine.programs.platform == "cpu" else "")
    )


def _answer(
    console: Console, engine: Engine, given: str | list, params: Any, options: dict[str, Any], header: str, quiet: bool
) -> Completion:
    bar = _bar(console, TextColumn("prefill   "), BarColumn(), MofNCompleteColumn())
    task = bar.add_task("prefill", total=None)
    stream = engine.stream(given, params, on_prefill=lambda done, total: bar.update(task, completed=done, total=total), **options)
    # Only now: a request that is refused gets its one line and nothing else.
    common.tell_notes(console, engine.notes)
    tell_choice(console, engine.choice)
    console.print(header, style="dim", soft_wrap=True, markup=False)
    with bar:
        first = next(stream)
    reasoning, separator, piece = False, "", first
    for piece in chain([first], stream):
        if piece.reasoning:
            console.print(piece.reasoning, end="", style="dim italic", markup=False, soft_wrap=True)
            reasoning = True
        if reasoning and (piece.text or piece.completion):
            console.print()
            reasoning = False
        text = piece.text
        if piece.tokens and not engine.tokenizer.has_text:
            text, separator = separator + ",".join(map(str, piece.tokens)), ","
        if text and not quiet:
            sys.stdout.write(text)
            sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    assert piece.completion is not None, "the last piece has it"
    return piece.completion


def _bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A progress bar that vanishes when done, and does not show at all where stderr is no terminal."""
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _as_json(engine: Engine, completion: Completion) -> dict[str, Any]:
    return {
        "tokens": completion.tokens,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "device": engine.device,
        **({} if engine.choice is None else engine.choice.json()),
        "stats": dataclasses.asdict(completion.stats),
    }


def _statistics(console: Console, engine: Engine, completion: Completion) -> None:
    stats, count = completion.stats, len(completion.tokens)
    parts = [
        f"{completion.prompt_tokens} prompt tokens in {stats.prefill_s:.2f} s"
        + (f" ({stats.cached_tokens} from the cache)" if stats.cached_tokens else ""),
        f"{count} tokens in {stats.decode_s:.2f} s" + (f" ({(count - 1) / stats.decode_s:.1f}/s)" if stats.decode_s > 0 else ""),
        f"finish {completion.finish_reason}",
    ]
    if stats.drafted:
        parts.insert(2, f"{stats.accepted} of {stats.drafted} drafts accepted")
    console.print("; ".join(parts), style="dim", soft_wrap=True)
