"""The door of a fleet: reads a request once, finds its conversation, has a replica answer it, and tells of all of them.

A request whose replica dies before it has said anything goes to another: nothing is stored, so asking twice is asking once. One
that has begun cannot be taken over, because what the client has read may be the answer of no other replica: it ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ninfer_jax.fleet.affinity import Affinity, affinity_of
from ninfer_jax.fleet.call import Call, Head
from ninfer_jax.fleet.reports import Report, merged_metrics, merged_status
from ninfer_jax.server.body import parse_object, read_body
from ninfer_jax.server.errors import ApiError, error_body, error_response, is_anthropic
from ninfer_jax.server.guard import Guard
from ninfer_jax.server.service import Service, Settings

ATTEMPTS = 3
_LARGE = 1 << 16  # bytes of a body from which on parsing it would hold up the event loop
_METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]


class Lost(Exception):
    """The replica that had the request is gone."""


class Engines(Protocol):
    """The replicas. An answer of one that dies ends with `Lost`."""

    def send(self, call: Call, affinity: Affinity) -> AsyncGenerator[Head | bytes, None]: ...
    async def reports(self) -> list[Report]: ...


def build_front(settings: Settings, engines: Engines) -> Starlette:
    """The application: `/health`, `/metrics` and `/api/status` speak for all replicas, everything else goes to one of them."""
    service = Service(settings)
    routes = [
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/api/status", _status),
        Route("/{path:path}", _forward, methods=_METHODS),
    ]
    # Pages of other sites that may call get their headers from the replica's own application.
    app = Starlette(routes=routes, middleware=[Middleware(Guard, service=service)])
    app.state.service, app.state.engines = service, engines
    return app


async def _health(request: Request) -> Response:
    replicas = len(await request.app.state.engines.reports())
    said = {"status": "ok" if replicas else "loading", "replicas": replicas}
    return JSONResponse(said, 200 if replicas else 503, None if replicas else {"Retry-After": "5"})


async def _metrics(request: Request) -> Response:
    text = merged_metrics(await request.app.state.engines.reports())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _status(request: Request) -> Response:
    return JSONResponse(merged_status(await request.app.state.engines.reports()))


async def _forward(request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        body = await read_body(request, service.settings.max_body, service.settings.body_seconds)
    except ApiError as error:
        return error_response(error, request.url.path)

    def find() -> Affinity:
        return affinity_of(dict(request.headers), _object(body) if request.method == "POST" else None)

    affinity = find() if len(body) < _LARGE else await service.in_thread(find)
    call = Call(request.method, request.scope["path"], request.scope["query_string"], _passed_on(request), body)
    return _Forwarded(call, affinity, request.app.state.engines)


def _object(body: bytes) -> dict[str, Any] | None:
    """The body's object; None for what the replica will refuse, in its own words."""
    try:
        return parse_object(body)
    except ApiError:
        return None


def _passed_on(request: Request) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((bytes(name), bytes(value)) for name, value in request.scope["headers"] if name != b"transfer-encoding")


class _Forwarded(Response):
    """A replica's answer, handed on as it comes; given up when the client is gone."""

    def __init__(self, call: Call, affinity: Affinity, engines: Engines):
        self.background = None
        self._call, self._affinity, self._engines = call, affinity, engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handing, watch = asyncio.ensure_future(self._hand_on(scope, receive, send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({handing, watch}, return_when=asyncio.FIRST_COMPLETED)
            if handing.done():
                handing.result()
        finally:
            handing.cancel()
            watch.cancel()
            await asyncio.gather(handing, watch, return_exceptions=True)

    async def _hand_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._call.path
        for _ in range(ATTEMPTS):
            stream, count = False, 0
            try:
                async with aclosing(self._engines.send(self._call, self._affinity)) as answer:
                    async for part in answer:
                        if isinstance(part, Head):
                            kind = dict(part.headers).get(b"content-type", b"")
                            stream = kind.startswith(b"text/event-stream")
                            await send({"type": "http.response.start", "status": part.status, "headers": list(part.headers)})
                            body, more = part.body, part.more
                        else:
                            body, more = part, True
                        count += 1
                        await send({"type": "http.response.body", "body": body, "more_body": more})
                if count and not more:
                    return
                if count:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
            except Lost:
                if not count:
                    continue
                if not stream:
                    raise  # the connection is closed in the middle of a body whose length was told
                await send({"type": "http.response.body", "body": _last_event(path, count), "more_body": False})
                return
        lost = ApiError(503, "the replicas that had this request were lost; ask again", code="replica_lost", retry_after=5)
        await error_response(lost, path)(scope, receive, send)


def _last_event(path: str, number: int) -> bytes:
    """What ends a stream whose replica has died, in the shape of its API."""
    error = ApiError(503, "the replica that wrote this answer was lost; ask again", code="replica_lost")
    if path.startswith("/v1/responses"):
        said = {"status": "failed", "object": "response", "output": [], "error": {"code": error.code, "message": error.message}}
        event = {"type": "response.failed", "sequence_number": number, "response": said}
        return f"event: response.failed\ndata: {json.dumps(event)}\n\n".encode()
    name = "event: error\n" if is_anthropic(path) else ""
    return f"{name}data: {json.dumps(error_body(error, is_anthropic(path)))}\n\n".encode()


async def _gone(receive: Receive) -> None:
    with contextlib.suppress(RuntimeError):
        while (await receive())["type"] != "http.disconnect":
            pass
