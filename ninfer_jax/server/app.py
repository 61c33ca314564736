"""The ASGI application: routes, their guard, and answers to what has no route."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ninfer_jax.server import models
from ninfer_jax.server.chat import chat_completions
from ninfer_jax.server.completions import completions
from ninfer_jax.server.endpoint import endpoint, unexpected
from ninfer_jax.server.errors import ApiError, error_response
from ninfer_jax.server.guard import Guard
from ninfer_jax.server.messages import count_tokens, messages
from ninfer_jax.server.openapi import openapi
from ninfer_jax.server.pages import index, page_file
from ninfer_jax.server.responses import responses
from ninfer_jax.server.schemas import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from ninfer_jax.server.service import Service


def build_app(service: Service) -> Starlette:
    """The application over a service, whose engine may come later."""
    routes = [
        Route("/", index),
        Route("/page/{name}", page_file),
        Route("/v1/chat/completions", endpoint(ChatRequest, chat_completions), methods=["POST"]),
        Route("/v1/completions", endpoint(CompletionRequest, completions), methods=["POST"]),
        Route("/v1/responses", endpoint(ResponsesRequest, responses), methods=["POST"]),
        Route("/v1/messages", endpoint(MessagesRequest, messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoint(CountTokensRequest, count_tokens), methods=["POST"]),
        Route("/v1/models", models.list_models),
        Route("/v1/models/{name:path}", models.get_model),
        Route("/tokenize", endpoint(TokenizeRequest, models.tokenize), methods=["POST"]),
        Route("/detokenize", endpoint(DetokenizeRequest, models.detokenize), methods=["POST"]),
        Route("/health", models.health),
        Route("/metrics", models.metrics),
        Route("/api/status", models.status),
        Route("/openapi.json", openapi),
    ]
    middleware = [Middleware(Guard, service=service)]
    if service.settings.cors:
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=list(service.settings.cors), allow_methods=["*"], allow_headers=["*"])
        )
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_route, ApiError: _refused, Exception: _fault}
    )
    app.state.service = service
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is no such route", 405: f"{request.method} is not allowed here"}.get(error.status_code, error.detail)
    response = error_response(ApiError(error.status_code, f"{said}; GET /openapi.json lists what there is"), request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _fault(request: Request, error: Exception) -> Response:
    return error_response(unexpected(error), request.url.path)
