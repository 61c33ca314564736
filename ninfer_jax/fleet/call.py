"""A request on its way to a replica, and the server's application called with it: no socket in between, the same application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Call:
    """A request whose body is here. headers: as ASGI has them."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes = b""

    def scope(self) -> dict[str, Any]:
        """The ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "server": None,
            "client": None,
            "root_path": "",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode("utf-8", "surrogateescape"),
            "query_string": self.query,
            "headers": [list(pair) for pair in self.headers],
            "state": {},
        }


@dataclass(frozen=True)
class Head:
    """The beginning of an answer: all of it where `more` is False. What follows are bytes."""

    status: int
    headers: Headers
    body: bytes
    more: bool


async def answered(app: ASGIApp, call: Call, extra: Headers = ()) -> AsyncGenerator[Head | bytes, None]:
    """The application's answer, piece by piece; extra: headers that it gets. Closing the generator is a client that goes away."""
    pieces: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(maxsize=1)
    asked = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await asyncio.Event().wait()  # until it is cancelled: nobody goes away in here
        raise AssertionError

    running = asyncio.ensure_future(app(call.scope(), receive, pieces.put))
    start: MutableMapping[str, Any] | None = None
    begun = False
    try:
        while True:
            if (message := await _next(pieces, running)) is None:
                return
            if message["type"] == "http.response.start":
                start = message
                continue
            body, more = message.get("body", b""), bool(message.get("more_body", False))
            if not begun and start is not None:
                begun = True
                yield Head(start["status"], (*(tuple(pair) for pair in start.get("headers", ())), *extra), body, more)
            else:
                yield body
            if not more:
                return
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _next(pieces: asyncio.Queue[MutableMapping[str, Any]], running: asyncio.Future[None]) -> MutableMapping[str, Any] | None:
    """The next message; None at the end of the application, whose exception is raised here."""
    waiting = asyncio.ensure_future(pieces.get())
    try:
        await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        running.result()
        return None if pieces.empty() else pieces.get_nowait()
    finally:
        waiting.cancel()
