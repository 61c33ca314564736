"""The way of every POST: body, schema, handler, and refusals in the API's own shape."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ninfer_jax.server.body import parse_object, read_body, validated
from ninfer_jax.server.errors import ApiError, error_response
from ninfer_jax.server.schemas import Schema
from ninfer_jax.server.service import Service

S = TypeVar("S", bound=Schema)
Handler = Callable[[Service, Request, S], Awaitable[Response]]
log = logging.getLogger("ninfer_jax.server")
_LARGE = 1 << 16  # bytes of a body from which on parsing it would hold up the event loop


def endpoint(schema: type[S], handler: Handler[S]) -> Callable[[Request], Awaitable[Response]]:
    """The Starlette endpoint for a handler of checked requests."""

    async def answer(request: Request) -> Response:
        service: Service = request.app.state.service
        try:
            _ = service.engine  # no body is read for nothing
            body = await read_body(request, service.settings.max_body, service.settings.body_seconds)

            def check() -> S:
                return validated(schema, parse_object(body), service.settings.lenient)

            return await handler(service, request, check() if len(body) < _LARGE else await service.in_thread(check))
        except ApiError as error:
            return error_response(error, request.url.path)
        except Exception as error:
            return error_response(unexpected(error), request.url.path)

    return answer


def unexpected(error: Exception) -> ApiError:
    """The 500 for a fault of the server's; the log gets its place but not its message, which may quote a prompt."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    log.error("%s in %s, line %s (%s)", type(error).__name__, frame.filename.rsplit("/", 1)[-1], frame.lineno, frame.name)
    return ApiError(500, f"internal error: {type(error).__name__}; the server's log says where")
