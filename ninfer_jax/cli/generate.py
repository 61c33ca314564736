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

if TYPE_CHECKING:
    from ninfer_jax.engine import Completion, Engine

_Option = typer.Option


def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face checkpoint directory, or `tiny` for the bundled model.")],
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="`-` reads the prompt from stdin.")] = None,
    prompt: Annotated[str | None, _Option(help="Raw text to continue.")] = None,
    messages: Annotated[Path | None, _Option(help="A JSON file: a list of chat messages.")] = None,
    max_new: Annotated[int, _Option(help="Tokens to generate at most.")] = 512,
    greedy: Annotated[bool, _Option("--greedy", help="Take the most likely token each time.")] = False,
    temperature: Annotated[float | None, _Option(help="Default: the checkpoint's own.")] = None,
    top_k: Annotated[int | None, _Option(help="Default: the checkpoint's own; 0 is off.")] = None,
    top_p: Annotated[float | None, _Option(help="Default: the checkpoint's own.")] = None,
    min_p: Annotated[float | None, _Option(help="Default: the checkpoint's own.")] = None,
    no_thinking: Annotated[bool, _Option("--no-thinking", help="With --messages: answer without reasoning.")] = False,
    context: Annotated[int | None, _Option(help="Capacity in tokens; default: the model's own, up to 262144.")] = None,
    kv: Annotated[str | None, _Option(help="KV format: f32, bf16, int8, rk8v4, rk4v4, rk4v4-e8.")] = None,
    draft: Annotated[int, _Option(help="Tokens the MTP head drafts a round, 0 to 5.")] = 0,
    slots: Annotated[int, _Option(help="Sequences side by side, 1 to 4.")] = 1,
    dtype: Annotated[str, _Option(help="auto, float32 or bfloat16.")] = "auto",
    pool: Annotated[int | None, _Option(help="Tokens that all slots share; default: every slot its whole context.")] = None,
    prefill_chunk: Annotated[
        int | None, _Option(help="Tokens of one prefill call, a multiple of 64; default: 1024 on a card, 512 on a CPU.")
    ] = None,
    programs: Annotated[
        Path | None, _Option(help="Executables from `ninfer-jax compile`; only from a directory you trust.")
    ] = None,
    no_verify: Annotated[bool, _Option("--no-verify", help="Of an artifact: leave its digests unchecked.")] = False,
    seed: Annotated[int | None, _Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, _Option(help="A string that ends the answer; may be given several times.")] = None,
    as_json: Annotated[bool, _Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Complete a prompt, or answer messages."""
    console = Console(stderr=True, highlight=False, emoji=False)
    try:
        _run(
            console,
            model,
            _input(source, prompt, messages),
            as_json,
            no_thinking,
            dict(
                max_new_tokens=max_new,
                temperature=0.0 if greedy else temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                stop=tuple(stop or ()),
            ),
            dict(context=context, kv=kv, draft=draft, slots=slots, dtype=dtype, pool=pool, prefill_chunk=prefill_chunk),
            dict(programs=programs, verify=not no_verify),
        )
    except ValueError as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _run(
    console: Console,
    model: str,
    given: str | list,
    as_json: bool,
    no_thinking: bool,
    sampling: dict[str, Any],
    shapes: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    # Imported here so that --help and mistakes in the arguments do not wait for JAX.
    from ninfer_jax.config import EngineConfig
    from ninfer_jax.decoding import SamplingParams

    config = EngineConfig(**shapes)
    given_sampling = {k: v for k, v in sampling.items() if v is not None}
    SamplingParams(**given_sampling)  # a mistake should not wait for the weights
    if no_thinking and isinstance(given, str):
        raise ValueError("--no-thinking goes with --messages: raw text has no chat template")
    path = _model_path(model)
    engine = _load(console, path, config, loading)
    params = engine.default_params(**given_sampling)
    options = {"enable_thinking": False} if no_thinking else {}
    completion = _answer(console, engine, given, params, options, _header(path.name, engine), quiet=as_json)
    if as_json:
        print(json.dumps(_as_json(engine, completion), ensure_ascii=False))
    else:
        _statistics(console, engine, completion)


def _input(source: str | None, prompt: str | None, messages: Path | None) -> str | list:
    """The prompt text or the messages, from exactly one of the three places."""
    if source not in (None, "-"):
        raise ValueError(f"unexpected argument {source!r}; give the prompt with --prompt, or - to read stdin")
    if sum(x is not None for x in (source, prompt, messages)) != 1:
        raise ValueError("give exactly one of --prompt TEXT, --messages FILE.json and -")
    if prompt is not None:
        return prompt
    if messages is None:
        return _decode(sys.stdin.buffer.read(), "stdin")
    try:
        text = _decode(messages.read_bytes(), str(messages))
        parsed = json.loads(text)
    except OSError as error:
        raise ValueError(f"{messages}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{messages}: not JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise ValueError(f"{messages}: nested too deeply") from None
    if not isinstance(parsed, list) or not parsed or not all(isinstance(m, dict) for m in parsed):
        raise ValueError(f"{messages}: must hold a list of messages, each an object with role and content")
    return parsed


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 (byte {error.start})") from None


def _model_path(model: str) -> Path:
    from ninfer_jax.checkpoints import tiny_path

    path = Path(model)
    return tiny_path() if model == "tiny" and not path.exists() else path


def _load(console: Console, path: Path, config: Any, loading: dict[str, Any]) -> Engine:
    from ninfer_jax.engine import Engine

    with _bar(console, TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage:10s}", total=total)
            bar.update(tasks[stage], completed=done)

        return Engine.load(path, config, **loading, progress=show)


def _header(name: str, engine: Engine) -> str:
    shape = engine.programs.shape
    return (
        f"{name} on {engine.device} ({engine.programs.platform}), {shape.dtype}, context {shape.context}, "
        f"kv {shape.kv}, draft {shape.draft}, slots {shape.slots}"
    )


def _answer(
    console: Console, engine: Engine, given: str | list, params: Any, options: dict[str, Any], header: str, quiet: bool
) -> Completion:
    bar = _bar(console, TextColumn("prefill   "), BarColumn(), MofNCompleteColumn())
    task = bar.add_task("prefill", total=None)
    stream = engine.stream(given, params, on_prefill=lambda done, total: bar.update(task, completed=done, total=total), **options)
    # Only now: a request that is refused gets its one line and nothing else.
    console.print(header, style="dim", soft_wrap=True, markup=False)
    with bar:
        first = next(stream)
    completion, reasoning = None, False
    for piece in chain([first], stream):
        if piece.reasoning:
            console.print(piece.reasoning, end="", style="dim italic", markup=False, soft_wrap=True)
            reasoning = True
        if reasoning and (piece.text or piece.completion):
            console.print()
            reasoning = False
        if piece.text and not quiet:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        completion = piece.completion
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return completion


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
        "stats": dataclasses.asdict(completion.stats),
    }


def _statistics(console: Console, engine: Engine, completion: Completion) -> None:
    stats, count = completion.stats, len(completion.tokens)
    parts = [
        f"{completion.prompt_tokens} prompt tokens in {stats.prefill_s:.2f} s",
        f"{count} tokens in {stats.decode_s:.2f} s" + (f" ({(count - 1) / stats.decode_s:.1f}/s)" if stats.decode_s > 0 else ""),
        f"finish {completion.finish_reason}",
    ]
    if stats.drafted:
        parts.insert(2, f"{stats.accepted} of {stats.drafted} drafts accepted")
    console.print("; ".join(parts), style="dim", soft_wrap=True)
