"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ninfer_jax.server.answer import Answer, Ask, Ending, Usage
from ninfer_jax.server.backend import Backend
from ninfer_jax.server.collect import Whole, gather
from ninfer_jax.server.endpoint import unexpected
from ninfer_jax.server.errors import ApiError, bad, error_body
from ninfer_jax.server.events import as_event
from ninfer_jax.server.from_messages import chat_messages, chat_tools
from ninfer_jax.server.grammars import constrained
from ninfer_jax.server.opaque import sealed
from ninfer_jax.server.prepare import chat_ids, params_of
from ninfer_jax.server.schemas import CountTokensRequest, MessagesRequest
from ninfer_jax.server.service import Service, session_of
from ninfer_jax.server.streams import EventStream, unless_gone, with_heartbeat
from ninfer_jax.server.thinking import Thought, thought_of_messages
from ninfer_jax.server.tools import parser_for, plan_of
from ninfer_jax.text.tools import CallArguments, CallBegin, CallEnd, ContentText, Event, ReasoningText, ToolPlan

_SIGNATURE = "ninfer"  # clients send thinking blocks back only if they are signed


async def messages(service: Service, request: Request, body: MessagesRequest) -> Response:
    """The answer of the handler; see `endpoint`."""
    arrived = time.perf_counter()
    backend = service.engine
    model = service.check_model(body.model)
    ask, hidden = await service.in_thread(lambda: _ask(service, backend, request, body, arrived))
    answer = await Answer.open(service, ask, "messages")
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
    if body.stream:
        events = _events(service, answer, head, len(ask.ids), hidden)
        return EventStream(events, service.settings.send_seconds, answer.drop)

    async def whole() -> Response:
        try:
            one = await gather(answer)
        finally:
            answer.drop()
        assert one.ending is not None
        reason = {"stop_reason": _reason(one.ending), "stop_sequence": one.ending.stop}
        return JSONResponse(head | {"content": _content(one, hidden)} | reason | {"usage": _usage(one.ending.usage)})

    return await unless_gone(request, whole)


async def count_tokens(service: Service, request: Request, body: CountTokensRequest) -> Response:
    """The number of tokens of a request's prompt."""
    backend = service.engine
    service.check_model(body.model)
    ids = (await service.in_thread(lambda: _rendered(service, backend, body)))[0]
    return JSONResponse({"input_tokens": len(ids)})


def _rendered(service: Service, backend: Backend, body: CountTokensRequest) -> tuple[list[int], tuple[int, ...], ToolPlan, Thought]:
    thought = thought_of_messages(body, backend.text.template)
    choice = None if body.tool_choice is None else body.tool_choice.model_dump(exclude_none=True)
    plan = plan_of(chat_tools(body.tools), choice)
    found, marks = chat_messages(body, service.settings.keep_nonces)
    return (*chat_ids(backend, found, plan.rendered, thought.options, marks), plan, thought)


def _ask(service: Service, backend: Backend, request: Request, body: MessagesRequest, arrived: float) -> tuple[Ask, bool]:
    ids, snapshots, plan, thought = _rendered(service, backend, body)
    plan, grammar = constrained(plan, body.tools, body.output_config.format if body.output_config else None, "output_config.format")
    params = params_of(
        backend,
        max_new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        grammar=grammar,
    )
    stops = params_of(backend, stop=tuple(body.stop_sequences or ())).stop
    user = (body.metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise bad("metadata.user_id: must be a string")
    session = session_of(dict(request.headers), user)
    parser = parser_for(ids, backend.text.tokenizer, plan, stops, prefix="toolu_")
    return Ask(ids, params, parser, thought.budget, plan.prefix, session, snapshots, arrived), thought.hidden


def _content(whole: Whole, hidden: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if whole.reasoning:
        signature = sealed(whole.reasoning) if hidden else _SIGNATURE
        blocks.append({"type": "thinking", "thinking": "" if hidden else whole.reasoning, "signature": signature})
    if whole.text:
        blocks.append({"type": "text", "text": whole.text})
    for call in whole.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _reason(ending: Ending) -> str:
    if ending.stop is not None:
        return "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(ending.finish, "end_turn")


def _usage(usage: Usage) -> dict[str, Any]:
    """input_tokens are those that were not cached, as that API counts."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


class _Blocks:
    """The events of content blocks, of which one is open at a time."""

    def __init__(self, hidden: bool):
        self._hidden = hidden
        self._index = -1
        self._open = ""
        self._thoughts = ""

    def events(self, events: list[Event]) -> list[dict[str, Any]]:
        """The API's events for a round's; neighbouring text is one delta."""
        said: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ReasoningText):
                said += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._thoughts += event.text
                if not self._hidden:
                    self._append(said, "thinking_delta", "thinking", event.text)
            elif isinstance(event, ContentText):
                said += self._begin("text", {"type": "text", "text": ""})
                self._append(said, "text_delta", "text", event.text)
            elif isinstance(event, CallBegin):
                said += self.close()
                said += self._begin("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            elif isinstance(event, CallArguments):
                self._append(said, "input_json_delta", "partial_json", event.delta)
            elif isinstance(event, CallEnd):
                said += self.close()
        return said

    def close(self) -> list[dict[str, Any]]:
        """The end of the open block, if there is one."""
        if not self._open:
            return []
        said: list[dict[str, Any]] = []
        if self._open == "thinking":
            self._append(said, "signature_delta", "signature", sealed(self._thoughts) if self._hidden else _SIGNATURE)
            self._thoughts = ""
        self._open = ""
        return [*said, {"type": "content_block_stop", "index": self._index}]

    def _begin(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        said = self.close()
        self._open, self._index = kind, self._index + 1
        return [*said, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _append(self, said: list[dict[str, Any]], kind: str, key: str, text: str) -> None:
        last = said[-1] if said else {}
        if last.get("type") == "content_block_delta" and last["delta"]["type"] == kind:
            last["delta"][key] += text
        else:
            said.append({"type": "content_block_delta", "index": self._index, "delta": {"type": kind, key: text}})


async def _events(service: Service, answer: Answer, head: dict, prompt: int, hidden: bool) -> AsyncGenerator[bytes, None]:
    def named(said: dict[str, Any]) -> bytes:
        return as_event(said, said["type"])

    # What is cached shows once the engine has begun; the last event has the numbers that count.
    start = head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(Usage(prompt, 0, 1, 0))}
    blocks = _Blocks(hidden)
    try:
        yield named({"type": "message_start", "message": start})
        async with aclosing(with_heartbeat(answer.steps(), service.settings.heartbeat)) as steps:
            async for step in steps:
                if step is None:
                    yield named({"type": "ping"})
                    continue
                for said in blocks.events(step.events):
                    yield named(said)
                if step.ending is not None:
                    for said in blocks.close():
                        yield named(said)
                    delta = {"stop_reason": _reason(step.ending), "stop_sequence": step.ending.stop}
                    yield named({"type": "message_delta", "delta": delta, "usage": _usage(step.ending.usage)})
        yield named({"type": "message_stop"})
    except ApiError as error:
        yield named(error_body(error, True))
    except Exception as error:
        yield named(error_body(unexpected(error), True))
