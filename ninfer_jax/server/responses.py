"""`POST /v1/responses`: OpenAI's newer API, as Codex speaks it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ninfer_jax.server.answer import Answer, Ask, Ending, Usage
from ninfer_jax.server.backend import Backend
from ninfer_jax.server.endpoint import unexpected
from ninfer_jax.server.errors import ApiError, bad
from ninfer_jax.server.events import as_event
from ninfer_jax.server.from_responses import chat_messages, chat_tools
from ninfer_jax.server.grammars import constrained
from ninfer_jax.server.items import Items
from ninfer_jax.server.prepare import chat_ids, sampling_params
from ninfer_jax.server.schemas import ResponsesRequest
from ninfer_jax.server.service import Service, session_of
from ninfer_jax.server.streams import EventStream, unless_gone, with_heartbeat
from ninfer_jax.server.thinking import thought_of
from ninfer_jax.server.tools import parser_for, plan_of

_SEALED = "reasoning.encrypted_content"


async def responses(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """The answer of the handler; see `endpoint`."""
    arrived = time.perf_counter()
    backend = service.engine
    model = service.check_model(body.model)
    if body.top_logprobs:
        raise bad("top_logprobs: not supported on this route; /v1/chat/completions has logprobs", "top_logprobs")
    for index, wanted in enumerate(body.include or ()):
        if wanted != _SEALED:
            raise bad(f"include[{index}]: {wanted!r} is not supported, {_SEALED!r} is", f"include[{index}]")
    ask, hidden, skipped = await service.in_thread(lambda: _ask(service, backend, request, body, arrived))
    answer = await Answer.open(service, ask, "responses")
    summary = bool(body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary) not in (None, "none"))
    items = Items(summary, _SEALED in (body.include or ()), hidden)
    head = _head(body, ask, model)
    headers = {"x-ninfer-skipped-tools": ", ".join(skipped)} if skipped else {}
    if body.stream:
        return EventStream(_events(service, answer, head, items), service.settings.send_seconds, answer.drop, headers)

    async def whole() -> Response:
        ending = None
        try:
            async for step in answer.steps():
                items.events(step.events)
                ending = step.ending
        finally:
            answer.drop()
        assert ending is not None
        items.close("incomplete" if ending.finish == "length" else "completed")
        return JSONResponse(head | _finished(items, ending), headers=headers)

    return await unless_gone(request, whole)


def _ask(
    service: Service, backend: Backend, request: Request, body: ResponsesRequest, arrived: float
) -> tuple[Ask, bool, tuple[str, ...]]:
    """(what the engine gets, whether reasoning is hidden, types of tools that were left out)."""
    thought = thought_of(body, backend.text.template)
    tools, skipped = chat_tools(body.tools)
    plan = plan_of(tools, body.tool_choice, body.parallel_tool_calls)
    functions = [tool for tool in body.tools or () if tool.get("type") == "function"]
    plan, grammar = constrained(plan, functions, body.text.format if body.text else None, "text.format")
    params = sampling_params(backend, body, max_new_tokens=body.max_output_tokens, grammar=grammar)
    ids, snapshots = chat_ids(backend, chat_messages(body), plan.rendered, thought.options)
    session = session_of(dict(request.headers), body.prompt_cache_key)
    parser = parser_for(ids, backend.text.tokenizer, plan, params.stop)
    ask = Ask(ids, replace(params, stop=()), parser, thought.budget, plan.prefix, session, snapshots, arrived)
    return ask, thought.hidden, skipped


def _head(body: ResponsesRequest, ask: Ask, model: str) -> dict[str, Any]:
    """The response as it begins."""
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": body.reasoning.summary if body.reasoning else None},
        "service_tier": "default",
        "store": False,
        "temperature": ask.params.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": ask.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _finished(items: Items, ending: Ending) -> dict[str, Any]:
    cut = ending.finish == "length"
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items.output,
        "usage": _usage(ending.usage),
        "completed_at": int(time.time()),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


async def _events(service: Service, answer: Answer, head: dict[str, Any], items: Items) -> AsyncGenerator[bytes, None]:
    number = -1

    def named(said: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return as_event(said | {"sequence_number": number}, said["type"])

    def failed(error: ApiError) -> bytes:
        said = {"code": error.code or "server_error", "message": error.message}
        return named({"type": "response.failed", "response": head | {"status": "failed", "error": said, "output": items.output}})

    try:
        yield named({"type": "response.created", "response": head})
        yield named({"type": "response.in_progress", "response": head})
        async with aclosing(with_heartbeat(answer.steps(), service.settings.heartbeat)) as steps:
            async for step in steps:
                if step is None:  # comments do not count as life with Codex
                    yield named({"type": "response.in_progress", "response": head})
                    continue
                for said in items.events(step.events):
                    yield named(said)
                if step.ending is not None:
                    cut = step.ending.finish == "length"
                    for said in items.close("incomplete" if cut else "completed"):
                        yield named(said)
                    last = "response.incomplete" if cut else "response.completed"
                    yield named({"type": last, "response": head | _finished(items, step.ending)})
    except ApiError as error:
        yield failed(error)
    except Exception as error:
        yield failed(unexpected(error))
