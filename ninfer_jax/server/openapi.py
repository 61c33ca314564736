"""The OpenAPI document: requests from the very models that check them, refusals in each API's shape."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse

from ninfer_jax import __version__
from ninfer_jax.server.errors import is_anthropic
from ninfer_jax.server.schemas import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    Schema,
    TokenizeRequest,
)

# path -> (schema of its body, what it does, whether it streams where the body asks for it)
_POSTS: dict[str, tuple[type[Schema], str, bool]] = {
    "/v1/chat/completions": (ChatRequest, "Answer messages (OpenAI's chat API).", True),
    "/v1/completions": (CompletionRequest, "Continue text or token ids.", True),
    "/v1/responses": (ResponsesRequest, "Answer items (OpenAI's Responses API); nothing is stored.", True),
    "/v1/messages": (MessagesRequest, "Answer messages (Anthropic's API).", True),
    "/v1/messages/count_tokens": (CountTokensRequest, "Tokens of a request's prompt.", False),
    "/tokenize": (TokenizeRequest, "Token ids of text or of rendered messages.", False),
    "/detokenize": (DetokenizeRequest, "Text of token ids.", False),
}
_GETS = {
    "/v1/models": "The model that is served.",
    "/v1/models/{name}": "The model, if it has this name.",
    "/health": "200 once requests are answered, else 503.",
    "/metrics": "Counters for Prometheus.",
    "/api/status": "Numbers of the dashboard.",
    "/openapi.json": "This document.",
}
_REFUSALS = {
    "400": "A field is wrong, unknown or not supported; the message names it",
    "401": "The key is missing or wrong",
    "403": "A page of another site",
    "404": "No such model",
    "408": "The body did not come",
    "413": "The body is too large",
    "429": "The queue is full",
    "500": "A fault of the server's",
    "503": "Loading, shutting down, or the answer was lost",
}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


async def openapi(request: Request) -> JSONResponse:
    """The document."""
    return JSONResponse(document())


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1 of every route, without the page's."""
    reference = "#/components/schemas/{model}"
    _, definitions = models_json_schema([(schema, "validation") for schema, _, _ in _POSTS.values()], ref_template=reference)
    schemas = definitions.get("$defs", {}) | {"OpenAIError": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths: dict[str, Any] = {path: {"post": _post(path, *what)} for path, what in _POSTS.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in _GETS.items()}
    keys = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ninfer-jax", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _post(path: str, schema: type[Schema], summary: str, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "object", "description": "An event; `data` is JSON"}}
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "Done", "content": content}} | _refusals(path),
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    kind, schema = ("text/plain", {"type": "string"}) if path == "/metrics" else ("application/json", {"type": "object"})
    said: dict[str, Any] = {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_").replace(".", "_").translate({123: None, 125: None}),
        "responses": {"200": {"description": "Done", "content": {kind: {"schema": schema}}}} | _refusals(path),
    }
    if path == "/health":
        said["responses"]["503"]["content"] = {"application/json": {"schema": {"type": "object"}}}
        said["security"] = [{}]
    if "{name}" in path:
        said["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return said


def _refusals(path: str) -> dict[str, Any]:
    name = "AnthropicError" if is_anthropic(path) else "OpenAIError"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {status: {"description": words, "content": content} for status, words in _REFUSALS.items()}
