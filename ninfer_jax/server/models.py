"""Small routes: models, tokens, health, metrics and the dashboard's numbers."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ninfer_jax.server.conversation import tool_results_in_order
from ninfer_jax.server.errors import ApiError, bad, error_response
from ninfer_jax.server.prepare import chat_ids
from ninfer_jax.server.schemas import DetokenizeRequest, TokenizeRequest
from ninfer_jax.server.service import Phase, Service
from ninfer_jax.server.tools import plan_of


def _described(service: Service) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": service.settings.model_id,
        "object": "model",
        "created": int(service.started),
        "owned_by": "local",
    }
    if service.backend is not None:
        model |= {"max_model_len": service.backend.context, "meta": service.backend.describe()}
    # Anthropic's list has the same route; its fields stand beside OpenAI's.
    shown = {"type": "model", "display_name": service.settings.model_id}
    return model | shown | {"created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.started))}


async def list_models(request: Request) -> Response:
    """The one model."""
    name = (model := _described(request.app.state.service))["id"]
    return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


async def get_model(request: Request) -> Response:
    """The model, if it is asked for by one of its names."""
    service: Service = request.app.state.service
    try:
        service.check_model(request.path_params["name"])
    except ApiError as error:
        return error_response(error, request.url.path)
    return JSONResponse(_described(service))


async def health(request: Request) -> Response:
    """200 once requests are answered; 503 with what it is waiting for until then, and while the server stops."""
    service: Service = request.app.state.service
    said: dict[str, Any] = {"status": "ok" if service.phase is Phase.READY else service.phase.value}
    if service.phase is Phase.LOADING:
        said["progress"] = _progress(service)
    ready = service.phase is Phase.READY
    return JSONResponse(said, 200 if ready else 503, None if ready else {"Retry-After": "5"})


def _progress(service: Service) -> dict[str, dict[str, int]]:
    return {stage: {"done": done, "total": total} for stage, (done, total) in list(service.progress.items())}


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def status(request: Request) -> Response:
    """The dashboard's numbers as one JSON object."""
    service: Service = request.app.state.service
    said: dict[str, Any] = {
        "phase": service.phase.value,
        "model": _described(service),
        "uptime_s": time.time() - service.started,
        "running": service.running,
        "progress": _progress(service),
        "recent": list(service.metrics.recent),
        "totals": service.metrics.totals(),
        "today": service.metrics.today(),
        "tokens": service.metrics.tokens,
        "joules": None if service.joules is None else service.joules(),
        "memory": service.memory,
    }
    if service.backend is not None:
        said["load"] = dataclasses.asdict(service.backend.load())
    return JSONResponse(said)


async def tokenize(service: Service, request: Request, body: TokenizeRequest) -> Response:
    """Token ids of text or of rendered messages, with the model's context for comparison."""
    backend = service.engine
    service.check_model(body.model)
    text = body.content if body.content is not None else body.prompt
    if (text is None) == (body.messages is None):
        raise bad("content: give either content (text) or messages", "content")

    def encode() -> list[int]:
        if text is not None:
            return backend.text.tokenizer.encode(text, allow_special=bool(body.add_special))
        shown = plan_of(body.tools).rendered
        messages = tool_results_in_order(body.messages or [])
        generate = body.add_generation_prompt is not False
        return chat_ids(backend, messages, shown, body.chat_template_kwargs or {}, generate=generate)[0]

    ids = await service.in_thread(encode)
    said: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": backend.context}
    if body.with_pieces:
        pieces = [backend.text.tokenizer.decode_bytes([token], skip_special=False) for token in ids]
        said["tokens"] = [
            {"id": token, "piece": piece.decode("utf-8", "replace")} for token, piece in zip(ids, pieces, strict=True)
        ]
    return JSONResponse(said)


async def detokenize(service: Service, request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, control tokens written out."""
    backend = service.engine
    service.check_model(body.model)
    size = backend.text.tokenizer.vocab_size
    wrong = next((at for at, token in enumerate(body.tokens) if not 0 <= token < size), None)
    if wrong is not None:
        raise bad(f"tokens[{wrong}]: {body.tokens[wrong]} is no token, the vocabulary has 0 to {size - 1}", f"tokens[{wrong}]")
    text = await service.in_thread(lambda: backend.text.tokenizer.decode(body.tokens, skip_special=False))
    return JSONResponse({"content": text, "prompt": text})
