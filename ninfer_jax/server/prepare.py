"""From a checked request to what the engine takes: sampling settings, and prompt ids with the places of cache marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.server.backend import Backend
from ninfer_jax.server.errors import bad, too_long
from ninfer_jax.server.schemas.common import Sampling
from ninfer_jax.text import render_prompt

_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)
_SAME_UNDER_OTHER_NAMES = {"max_new_tokens": "max_tokens", "stop_ids": "stop_token_ids"}
MAX_STOPS = 16
MAX_MARKS = 4


def sampling_params(backend: Backend, request: Sampling, **changes: Any) -> SamplingParams:
    """The settings of a request over the checkpoint's own; ApiError names the field. changes: further settings."""
    given = {name: value for name in _DIRECT if (value := getattr(request, name)) is not None}
    stop = request.stop
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if request.stop_token_ids is not None:
        given["stop_ids"] = tuple(request.stop_token_ids)
    if request.logit_bias:
        given["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    return params_of(backend, **given, **changes)


def params_of(backend: Backend, **given: Any) -> SamplingParams:
    """`given` over the checkpoint's defaults; None stands for not given. ApiError names the field as requests do."""
    given = {name: value for name, value in given.items() if value is not None}
    if len(given.get("stop", ())) > MAX_STOPS:
        raise bad(f"stop: {len(given['stop'])} strings, at most {MAX_STOPS} are allowed")
    try:
        return backend.default_params(**given)
    except ValueError as error:
        message = str(error)
        for inner, outer in _SAME_UNDER_OTHER_NAMES.items():
            if message.startswith(inner):
                message = outer + message.removeprefix(inner)
        raise bad(message) from None


def chat_ids(
    backend: Backend,
    messages: list[Any],
    tools: list[Any] | None,
    options: dict[str, Any],
    marks: Sequence[int] = (),
    generate: bool = True,
) -> tuple[list[int], tuple[int, ...]]:
    """(ids of the rendered prompt, lengths at which it was marked for the cache). marks: numbers of messages after which the
    client asks for an entry. ApiError for messages that cannot be rendered. Blocks: call it off the event loop."""
    text = backend.text
    if text.template is None:
        raise bad("messages: this model has no chat template; use /v1/completions")
    if not messages:
        raise bad("messages: empty, at least one message is needed")
    if all(isinstance(m, Mapping) and m.get("role") in ("system", "developer") for m in messages):
        raise bad("messages: only system text; a user message is needed")
    try:
        ids = render_prompt(text.template, text.tokenizer, messages, tools, generate, **options).ids
    except ValueError as error:
        raise bad(str(error), "messages" if str(error).startswith("chat template") else None) from None
    if len(ids) >= backend.context:
        return ids, ()  # it will be refused
    return ids, tuple(
        dict.fromkeys(filter(None, (_marked(text, messages, tools, options, mark, ids) for mark in marks[-MAX_MARKS:])))
    )


def text_ids(backend: Backend, text: str) -> list[int]:
    """The ids of raw text; ApiError if there are none."""
    try:
        ids = backend.text.tokenizer.encode(text)
    except ValueError as error:
        raise bad(str(error), "prompt") from None
    if not ids:
        raise bad("prompt: empty")
    return ids


def fits(backend: Backend, ids: Sequence[int]) -> None:
    """ApiError where a prompt leaves no room for an answer."""
    if len(ids) >= backend.context:
        raise too_long(len(ids), backend.context)


def _marked(text: Any, messages: list[Any], tools: Any, options: dict[str, Any], mark: int, ids: list[int]) -> int | None:
    """Tokens that the prompt has in common with the rendering of its first `mark` messages; None where that has none."""
    try:
        start = render_prompt(text.template, text.tokenizer, messages[:mark], tools, False, **options).ids
    except ValueError:
        return None  # as many templates refuse a system message alone: no entry there
    common = next((at for at, (a, b) in enumerate(zip(start, ids, strict=False)) if a != b), min(len(start), len(ids)))
    return common or None


def _token_id(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise bad(f"logit_bias: {text!r} is no token id", "logit_bias")
    return int(text)
