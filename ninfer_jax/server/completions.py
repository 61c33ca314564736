"""`POST /v1/completions`: raw text or token ids, continued."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ninfer_jax.server.answer import Answer, Ask, Usage
from ninfer_jax.server.backend import Backend
from ninfer_jax.server.chat import drop, gather_all, start, usage_of
from ninfer_jax.server.collect import Whole
from ninfer_jax.server.endpoint import unexpected
from ninfer_jax.server.errors import ApiError, bad, error_body
from ninfer_jax.server.events import DONE, KEEP_ALIVE, Chunks, as_event
from ninfer_jax.server.grammars import constrained
from ninfer_jax.server.prepare import fits, sampling_params, text_ids
from ninfer_jax.server.schemas import CompletionRequest
from ninfer_jax.server.service import Service, session_of
from ninfer_jax.server.streams import EventStream, together, unless_gone, with_heartbeat
from ninfer_jax.server.tools import RawParser, content_of, plan_of
from ninfer_jax.text import Tokenizer

if TYPE_CHECKING:
    from ninfer_jax.engine.results import TokenLogprob

_DEFAULT_TOKENS = 16  # the API's own
MAX_PROMPTS = 64


async def completions(service: Service, request: Request, body: CompletionRequest) -> Response:
    """The answer of the handler; see `endpoint`."""
    arrived = time.perf_counter()
    backend = service.engine
    model = service.check_model(body.model)
    asks = await service.in_thread(lambda: _asks(backend, request, body, arrived))
    tokenizer = backend.text.tokenizer
    before = [tokenizer.decode(ask.ids, skip_special=False) if body.echo else "" for ask in asks for _ in range(body.n or 1)]
    answers: list[Answer] = []
    try:
        for ask in asks:
            answers += await start(service, ask, body.n or 1, "completions")
    except BaseException:
        drop(answers)
        raise
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(service, answers, head, before, tokenizer if body.logprobs is not None else None, with_usage, body.n or 1)
        return EventStream(events, service.settings.send_seconds, lambda: drop(answers))

    async def whole() -> Response:
        try:
            gathered = await gather_all(answers)
        finally:
            drop(answers)
        choices = [_choice(i, one, before[i], tokenizer if body.logprobs is not None else None) for i, one in enumerate(gathered)]
        usage = _usage([one.ending.usage for one in gathered if one.ending], body.n or 1)
        return JSONResponse(head | {"choices": choices, "usage": usage})

    return await unless_gone(request, whole)


def _asks(backend: Backend, request: Request, body: CompletionRequest, arrived: float) -> list[Ask]:
    if body.echo and body.logprobs is not None:
        raise bad("echo: not together with logprobs, there are none of the prompt's tokens", "echo")
    _, grammar = constrained(plan_of(None), None, body.response_format)
    tokens = body.max_tokens or _DEFAULT_TOKENS
    params = sampling_params(backend, body, max_new_tokens=tokens, logprobs=body.logprobs, grammar=grammar)
    session = session_of(dict(request.headers), body.prompt_cache_key)
    found = []
    for ids in _prompts(backend, body.prompt):
        fits(backend, ids)
        found.append(Ask(ids, replace(params, stop=()), lambda: RawParser(params.stop), session=session, arrived=arrived))
    return found


def _prompts(backend: Backend, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [text_ids(backend, prompt)]
    if not prompt:
        raise bad("prompt: empty")
    several = [prompt] if isinstance(prompt[0], int) else prompt
    if len(several) > MAX_PROMPTS:
        raise bad(f"prompt: {len(several)} prompts, at most {MAX_PROMPTS} are allowed")
    return [text_ids(backend, one) if isinstance(one, str) else _checked(backend, one) for one in several]


def _checked(backend: Backend, ids: Any) -> list[int]:
    size = backend.text.tokenizer.vocab_size
    if not ids:
        raise bad("prompt: empty")
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise bad(f"prompt: holds token id {wrong}, the vocabulary has 0 to {size - 1}")
    return ids


def _choice(index: int, whole: Whole, before: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    listed = None if tokenizer is None else _logprobs(tokenizer, whole.logprobs, 0)
    finish = whole.ending.finish if whole.ending else "stop"
    return {"index": index, "text": before + whole.text, "logprobs": listed, "finish_reason": finish}


def _logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """The API's four lists; offset: of the first token in the text."""

    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special=False)

    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(text(entry.token))
    return {
        "tokens": [text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{text(token): value for token, value in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _usage(usages: list[Usage], n: int) -> dict[str, Any]:
    """The usage of several prompts, each of which has n answers."""
    total = usage_of(usages)
    total["prompt_tokens"] = sum(usage.prompt for usage in usages[::n])
    total["prompt_tokens_details"]["cached_tokens"] = sum(usage.cached for usage in usages[::n])
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return total


async def _events(
    service: Service, answers: list[Answer], head: dict, before: list[str], tokenizer: Tokenizer | None, with_usage: bool, n: int
) -> AsyncGenerator[bytes, None]:
    chunk = Chunks(head, {"usage": None} if with_usage else {})
    usages: dict[int, Usage] = {}
    lengths = [len(text) for text in before]

    def choice(index: int, text: str, listed: dict | None = None, finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": finish}

    try:
        for index, text in enumerate(before):
            if text:
                yield chunk([choice(index, text)])
        steps = with_heartbeat(together([answer.steps() for answer in answers]), service.settings.heartbeat)
        async with aclosing(steps):
            async for item in steps:
                if item is None:
                    yield KEEP_ALIVE
                    continue
                index, step = item
                text = content_of(step.events)
                listed = _logprobs(tokenizer, step.logprobs, lengths[index]) if tokenizer is not None and step.logprobs else None
                lengths[index] += len(text)
                if text or listed or step.ending:
                    yield chunk([choice(index, text, listed, step.ending.finish if step.ending else None)])
                if step.ending:
                    usages[index] = step.ending.usage
        if with_usage:
            yield chunk([], usage=_usage([usages[index] for index in sorted(usages)], n))
        yield DONE
    except ApiError as error:
        yield as_event(error_body(error, False))
    except Exception as error:
        yield as_event(error_body(unexpected(error), False))
