"""`ninfer-jax serve`: OpenAI's and Anthropic's APIs, and a page, over one engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ninfer_jax.cli import common
from ninfer_jax.cli.settings import tell_choice, with_profile
from ninfer_jax.files import directory, printable, read_text
from ninfer_jax.models import HubName, checked, short_name

if TYPE_CHECKING:
    from ninfer_jax.config import EngineConfig
    from ninfer_jax.engine import AsyncEngine, Engine
    from ninfer_jax.server import Service

_Option = typer.Option
_LOOPBACK = ("127.", "::1", "localhost")


def serve(
    ctx: typer.Context,
    model: common.Model,
    host: Annotated[str, _Option(help="Address to listen on; 0.0.0.0 is every one of this machine's.")] = "127.0.0.1",
    port: Annotated[int, _Option(help="Port; 0 takes one that is free.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        _Option(envvar="NINFER_API_KEY", help="A key that requests must have; may be given several times.", show_default=False),
    ] = None,
    api_key_file: Annotated[Path | None, common.path_option("Keys, one a line.")] = None,
    name: Annotated[
        str | None, _Option(help="The model's name in requests; default: its own, that of its directory, file or repository.")
    ] = None,
    alias: Annotated[list[str] | None, _Option(help="Another name that requests may use; '*' allows any.")] = None,
    lenient: Annotated[bool, _Option("--lenient", help="Ignore fields that are not known, instead of refusing them.")] = False,
    cors: Annotated[list[str] | None, _Option(help="An origin whose pages may call, like https://chat.example; '*': any.")] = None,
    keep_nonces: Annotated[
        bool, _Option("--keep-nonces", help="Leave Claude Code's changing line in system texts; it defeats the prefix cache.")
    ] = False,
    max_body: Annotated[int, _Option(help="MiB of a request's body at most.")] = 32,
    drain: Annotated[float, _Option(help="Seconds that running answers get after SIGTERM.")] = 30.0,
    queue: Annotated[int, _Option(help="Requests that may wait beside those in slots; more get 429.")] = 64,
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
) -> None:
    """Serve a model over HTTP until SIGTERM: /v1/chat/completions, /v1/responses, /v1/messages, a page at /, and more."""
    console = common.stderr_console()
    with common.one_line_errors(console, context=ctx):
        place, called = checked(model), short_name(model)
        if programs is not None:
            directory(programs, label="--programs ")
        if max_body < 1:
            raise ValueError(f"--max-body is {max_body}, it must be at least 1 MiB")
        if not 0 <= drain <= 3600:
            raise ValueError(f"--drain is {drain:g}, it must be from 0 to 3600 seconds")
        if not 0 <= queue <= 10_000:
            raise ValueError(f"--queue is {queue}, it must be from 0 to 10000")
        settings: dict[str, Any] = {
            "model_id": printable(name if name is not None else called),
            "aliases": (*(alias or ()), *([str(place)] if isinstance(place, HubName) and name is None else [])),
            "api_keys": _keys(api_key or [], api_key_file),
            "lenient": lenient,
            "cors": tuple(cors or ()),
            "keep_nonces": keep_nonces,
            "max_body": max_body << 20,
            "drain_seconds": drain,
        }
        shapes: dict[str, Any] = {"context": context, "kv": kv, "draft": draft, "drafter": drafter, "slots": slots, "pool": pool}
        shapes |= {"prefill_chunk": prefill_chunk, "dtype": dtype, "kernels": kernels, "prefix_cache": prefix_cache}
        shapes = with_profile(ctx, profile, shapes)
        shapes |= common.cache_settings(cache_bytes, cache_dir, cache_dir_bytes)
        shapes["program_cache"] = "off" if no_program_cache else "auto"
        loading = {"programs": programs, "verify": not no_verify, "recipe": recipe}
        _run(console, model, (host, port), settings, shapes, loading, queue)


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    if file is not None:
        given = given + [line.strip() for line in read_text(file).splitlines() if line.strip()]
        if not given:
            raise ValueError(f"--api-key-file {file} holds no key")
    if any(not key.strip() for key in given):
        raise ValueError("--api-key: empty (an unset variable?)")
    return tuple(dict.fromkeys(given))


def _run(
    console: Console,
    model: str,
    place: tuple[str, int],
    settings: dict[str, Any],
    shapes: dict[str, Any],
    loading: dict[str, Any],
    queue: int,
) -> None:
    try:
        from ninfer_jax.server import Service, Settings
        from ninfer_jax.server.process import listen, run, url_of
    except ModuleNotFoundError as error:
        if (error.name or "ninfer_jax").startswith("ninfer_jax"):
            raise
        raise ValueError(f"serve needs the extra `server` ({error.name} is missing): pip install 'ninfer-jax[server]'") from None
    from ninfer_jax.config import EngineConfig
    from ninfer_jax.engine.engine import LoadProgress

    config = EngineConfig(**shapes)
    service = Service(Settings(**settings))
    with listen(*place) as listening:

        def say(line: str) -> None:
            console.print(line, style="dim", markup=False, soft_wrap=True)

        def load(progress: LoadProgress) -> AsyncEngine:
            return _load(console, service, model, config, loading | {"progress": progress}, queue)

        if not place[0].startswith(_LOOPBACK) and not settings["api_keys"]:
            say(f"note: everybody who reaches {place[0]} may use this server; --api-key KEY asks for a key")
        say(f"listening on {url_of(listening)}, loading {short_name(model)}")
        ended = run(service, listening, load, say)
    say("stopped")
    if ended.loading:
        # A thread is in the midst of compiling, which nothing interrupts; there is nothing of it to keep.
        sys.stderr.flush()
        os._exit(0)


def _load(console: Console, service: Service, model: str, config: EngineConfig, loading: dict[str, Any], queue: int) -> AsyncEngine:
    import jax

    from ninfer_jax.bench.device import energy_meter
    from ninfer_jax.engine import AsyncEngine

    engine = AsyncEngine.open(model, config, queue=queue, say=common.teller(console), **loading)
    common.tell_notes(console, engine.notes)
    tell_choice(console, engine.choice)
    service.memory, service.joules = engine.call(_memory).result(), energy_meter(jax.devices()[0])
    about = engine.describe()
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if name != "device")
    console.print(f"{short_name(model)} on {about['device']}: {words}", style="dim", markup=False, soft_wrap=True)
    return engine


def _memory(engine: Engine) -> dict[str, Any]:
    """The bar of the dashboard: what is where, of all that the device has."""
    import jax

    from ninfer_jax.engine.memory import compiled_workspace, free_bytes
    from ninfer_jax.programs.plan import resident_parts

    device = jax.devices()[0]
    parts = resident_parts(engine.programs) | {"workspace": compiled_workspace(engine.programs)}
    stats = device.memory_stats()
    total = stats["bytes_limit"] if stats else sum(parts.values()) + (free_bytes(device) or 0)
    return {"total": total, "parts": parts}
