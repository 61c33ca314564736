"""`ninfer-jax launch`: what a client has to be told to use a server of this project."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console

from ninfer_jax.cli import common

_Option = typer.Option
KEY = "$NINFER_API_KEY"


@dataclass(frozen=True)
class ClientSettings:
    """environment: variables; values may name `KEY`. files: path below the home directory -> what to put there. words: where a
    person has to click, a line each."""

    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def _claude_code(url: str, model: str, context: int) -> ClientSettings:
    return ClientSettings(
        {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
        }
    )


def _codex(url: str, model: str, context: int) -> ClientSettings:
    lines = [
        f"model = {json.dumps(model)}",
        'model_provider = "ninfer"',
        f"model_context_window = {context}",
        "",
        "[model_providers.ninfer]",
        'name = "ninfer-jax"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
        f'env_key = "{KEY[1:]}"',
    ]
    return ClientSettings(files={".codex/config.toml": "\n".join(lines) + "\n"})


def _opencode(url: str, model: str, context: int) -> ClientSettings:
    limits = {"context": context, "output": min(32_768, context // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ninfer-jax",
        "options": {"baseURL": f"{url}/v1", "apiKey": f"{{env:{KEY[1:]}}}"},
        "models": {model: {"name": model, "reasoning": True, "tool_call": True, "limit": limits}},
    }
    settings = {"$schema": "https://opencode.ai/config.json", "provider": {"ninfer": provider}, "model": f"ninfer/{model}"}
    return ClientSettings(files={".config/opencode/opencode.json": json.dumps(settings, indent=2) + "\n"})


def _cline(url: str, model: str, context: int) -> ClientSettings:
    return ClientSettings(
        words=(
            "API Provider: OpenAI Compatible",
            f"Base URL: {url}/v1",
            f"API Key: the value of {KEY[1:]}",
            f"Model ID: {model}",
            f"Context Window Size: {context}",
        )
    )


def _open_webui(url: str, model: str, context: int) -> ClientSettings:
    return ClientSettings({"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "ENABLE_OLLAMA_API": "false"})


CLIENTS: dict[str, Callable[[str, str, int], ClientSettings]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "cline": _cline,
    "open-webui": _open_webui,
}


def settings_for(client: str, url: str, model: str, context: int) -> ClientSettings:
    """The settings; ValueError for a client that is not known."""
    if client not in CLIENTS:
        raise ValueError(f"client {client!r} is not known, {', '.join(CLIENTS)} are")
    return CLIENTS[client](url.rstrip("/"), model, context)


def launch(
    client: Annotated[str, typer.Argument(help=f"{', '.join(CLIENTS)}.")],
    url: Annotated[str, _Option(help="Where the server listens.")] = "http://127.0.0.1:8080",
    model: Annotated[str, _Option(help="The model's name there.")] = "tiny",
    context: Annotated[int, _Option(help="Its context in tokens (`max_model_len` of /v1/models).")] = 262_144,
) -> None:
    """Print what a client needs to use a server: variables for a shell, files, or what to click. Nothing is changed."""
    console = common.stderr_console()
    with common.one_line_errors(console):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url is {url!r}, it must begin with http:// or https://")
        found = settings_for(client, url, model, context)
    out = Console(highlight=False, emoji=False, soft_wrap=True)
    if found.environment or found.files:
        out.print(f"# {KEY[1:]}: the key that the server was given, any word if it has none", markup=False)
    for name, value in found.environment.items():
        out.print(f"export {name}={chr(34) + KEY + chr(34) if value == KEY else shlex.quote(value)}", markup=False)
    for name, text in found.files.items():
        out.print(f"# ~/{name}\n{text}", markup=False, end="")
    for line in found.words:
        out.print(line, markup=False)
