"""`POST /v1/chat/completions`: OpenAI's chat API, with `reasoning_content` beside `content`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ninfer_jax.server.answer import Answer, Ask, Step, Usage
from ninfer_jax.server.backend import Backend
from ninfer_jax.server.collect import Whole, gather, token_logprob
from ninfer_jax.server.conversation import tool_results_in_order, without_nonce
from ninfer_jax.server.endpoint import unexpected
from ninfer_jax.server.errors import ApiError, bad, error_body
from ninfer_jax.server.events import DONE, KEEP_ALIVE, Chunks, as_event
from ninfer_jax.server.grammars import constrained
from ninfer_jax.server.prepare import chat_ids, sampling_params
from ninfer_jax.server.schemas import ChatRequest
from ninfer_jax.server.service import Service, session_of
from ninfer_jax.server.streams import EventStream, together, unless_gone, with_heartbeat
from ninfer_jax.server.thinking import thought_of
from ninfer_jax.server.tools import parser_for, plan_of
from ninfer_jax.text import Tokenizer
from ninfer_jax.text.tools import CallArguments, CallBegin, ContentText, Event, ReasoningText


async def chat_completions(service: Service, request: Request, body: ChatRequest) -> Response:
    """The answer of the handler; see `endpoint`."""
    arrived = time.perf_counter()
    backend = service.engine
    model = service.check_model(body.model)
    ask, hidden = await service.in_thread(lambda: _ask(service, backend, request, body, arrived))
    answers = await start(service, ask, body.n or 1, "chat")
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(service, backend.text.tokenizer, answers, head, usage, bool(body.logprobs), hidden)
        return EventStream(events, service.settings.send_seconds, lambda: drop(answers))

    async def whole() -> Response:
        try:
            gathered = [await gather(answer) for answer in answers] if len(answers) == 1 else await gather_all(answers)
        finally:
            drop(answers)
        choices = [_choice(i, one, backend.text.tokenizer, bool(body.logprobs), hidden) for i, one in enumerate(gathered)]
        usage = usage_of([one.ending.usage for one in gathered if one.ending])
        return JSONResponse(head | {"object": "chat.completion", "choices": choices, "usage": usage})

    return await unless_gone(request, whole)


async def start(service: Service, ask: Ask, count: int, route: str) -> list[Answer]:
    """`count` answers to one request, submitted; of none where one is refused. Seeds of all but the first are the next numbers."""
    answers: list[Answer] = []
    try:
        for number in range(count):
            seed = ask.params.seed
            each = ask if seed is None or not number else replace(ask, params=replace(ask.params, seed=seed + number))
            answers.append(await Answer.open(service, each, route))
    except BaseException:
        drop(answers)
        raise
    return answers


def drop(answers: list[Answer]) -> None:
    """End them, whatever they have come to."""
    for answer in answers:
        answer.drop()


async def gather_all(answers: list[Answer]) -> list[Whole]:
    """All answers whole, read side by side."""
    wholes = [Whole() for _ in answers]
    async with aclosing(together([answer.steps() for answer in answers])) as steps:
        async for which, step in steps:
            whole = wholes[which]
            whole.add(step.events)
            whole.tokens += step.tokens
            whole.logprobs += step.logprobs
            whole.ending = step.ending
    return wholes


def usage_of(usages: list[Usage]) -> dict[str, Any]:
    """OpenAI's usage of several answers to one prompt."""
    prompt, completion = usages[0].prompt, sum(usage.completion for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning for usage in usages)},
    }


def prepared_messages(service: Service, messages: list[Any]) -> tuple[list[Any], list[int]]:
    """(messages for rendering, numbers of messages after which the client asks for a cache entry)."""
    messages = tool_results_in_order(messages)
    marks = [index + 1 for index, message in enumerate(messages) if _is_marked(message)]
    first = messages[0] if messages else None
    if not service.settings.keep_nonces and isinstance(first, Mapping) and first.get("role") == "system":
        content = first.get("content")
        if isinstance(content, str):
            messages = [{**first, "content": without_nonce(content)}, *messages[1:]]
    return messages, marks


def _is_marked(message: Any) -> bool:
    parts = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(parts, list) and any(isinstance(part, Mapping) and part.get("cache_control") for part in parts)


def _ask(service: Service, backend: Backend, request: Request, body: ChatRequest, arrived: float) -> tuple[Ask, bool]:
    """(what the engine gets, whether reasoning is hidden)."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise bad("max_tokens: given twice, also as max_completion_tokens", "max_tokens")
    thought = thought_of(body, backend.text.template)
    plan = plan_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    plan, grammar = constrained(plan, body.tools, body.response_format)
    params = sampling_params(
        backend,
        body,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    messages, marks = prepared_messages(service, body.messages)
    ids, snapshots = chat_ids(backend, messages, plan.rendered, thought.options, marks)
    session = session_of(dict(request.headers), body.prompt_cache_key)
    parser = parser_for(ids, backend.text.tokenizer, plan, params.stop)
    ask = Ask(ids, replace(params, stop=()), parser, thought.budget, plan.prefix, session, snapshots, arrived)
    return ask, thought.hidden


def _choice(index: int, whole: Whole, tokenizer: Tokenizer, logprobs: bool, hidden: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.text if whole.text or not whole.calls else None}
    if whole.reasoning and not hidden:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole.calls
        ]
    listed = {"content": [token_logprob(tokenizer, entry) for entry in whole.logprobs], "refusal": None} if logprobs else None
    finish = whole.ending.finish if whole.ending else "stop"
    return {"index": index, "message": message, "logprobs": listed, "finish_reason": finish}


async def _events(
    service: Service, tokenizer: Tokenizer, answers: list[Answer], head: dict, with_usage: bool, logprobs: bool, hidden: bool
) -> AsyncGenerator[bytes, None]:
    chunk = Chunks(head | {"object": "chat.completion.chunk"}, {"usage": None} if with_usage else {})
    usages: list[Usage] = []

    try:
        for index in range(len(answers)):
            yield chunk([_delta(index, {"role": "assistant", "content": ""})])
        steps = with_heartbeat(together([answer.steps() for answer in answers]), service.settings.heartbeat)
        async with aclosing(steps):
            async for item in steps:
                if item is None:
                    yield KEEP_ALIVE
                    continue
                index, step = item
                listed = _step_logprobs(tokenizer, step) if logprobs else None
                for delta in _deltas(step.events, hidden) or ([{}] if listed and listed["content"] else []):
                    yield chunk([_delta(index, delta, listed)])
                    listed = None
                if step.ending:
                    usages.append(step.ending.usage)
                    yield chunk([_delta(index, {}, None, step.ending.finish)])
        if with_usage:
            yield chunk([], usage=usage_of(usages))
        yield DONE
    except ApiError as error:
        yield as_event(error_body(error, False))
    except Exception as error:
        yield as_event(error_body(unexpected(error), False))


def _delta(index: int, delta: dict, logprobs: dict | None = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _step_logprobs(tokenizer: Tokenizer, step: Step) -> dict[str, Any]:
    return {"content": [token_logprob(tokenizer, entry) for entry in step.logprobs], "refusal": None}


def _deltas(events: list[Event], hidden: bool) -> list[dict[str, Any]]:
    """The deltas of a round: neighbours of one kind are one, so that a round is mostly one event."""
    deltas: list[dict[str, Any]] = []

    def append(key: str, text: str) -> None:
        if deltas and deltas[-1].keys() == {key}:
            deltas[-1][key] += text
        else:
            deltas.append({key: text})

    for event in events:
        if isinstance(event, ReasoningText):
            if not hidden and event.text:
                append("reasoning_content", event.text)
        elif isinstance(event, ContentText):
            append("content", event.text)
        elif isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            deltas.append({"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]})
        elif isinstance(event, CallArguments):
            last = deltas[-1].get("tool_calls") if deltas else None
            if last and last[0]["index"] == event.index:
                last[0]["function"]["arguments"] += event.delta
            else:
                deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]})
    return deltas
