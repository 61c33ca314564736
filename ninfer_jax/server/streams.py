"""Async streams: signs of life in silence, several answers as one, and an end when nobody reads any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_CLIENT_GONE = 499  # nobody reads it; nginx' number, for the counters


@dataclass(frozen=True)
class _End:
    """The end of a source, by an exception or without."""

    error: Exception | None


async def with_heartbeat(source: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Its items, and None whenever nothing has come for `seconds`. It is at most two items ahead of its reader."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[T | _End | None] = asyncio.Queue(maxsize=1)
    last = loop.time()

    async def read() -> None:
        nonlocal last
        error: Exception | None = None
        try:
            async for item in source:
                last = loop.time()
                await queue.put(item)
        except Exception as raised:
            error = raised
        await queue.put(_End(error))

    def beat() -> None:
        # One timer a stream: it looks when silence could have lasted long enough, instead of being set anew for each item.
        nonlocal timer, last
        now = loop.time()
        if now >= last + seconds:
            last = now
            if queue.empty():
                queue.put_nowait(None)
        timer = loop.call_at(last + seconds, beat)

    timer = loop.call_at(last + seconds, beat)
    reader = asyncio.create_task(read())
    try:
        while not isinstance(item := await queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        timer.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await source.aclose()


async def together(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(which source, item), as they come. The first exception ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(maxsize=len(sources))
    end = object()

    async def read(which: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((which, item, None))
            await queue.put((which, end, None))
        except Exception as error:
            await queue.put((which, end, error))

    tasks = [asyncio.create_task(read(which, source)) for which, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            which, item, error = await queue.get()
            if error is not None:
                raise error
            if item is end:
                left -= 1
            else:
                yield which, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """The response, unless the client closes the connection first: then the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work()), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=_CLIENT_GONE)
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(EventSourceResponse):
    """Server-sent events to a reader who has `send_seconds` to take each; one who does not is left, without ado.

    cleanup: called when it is over, also if it never began.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        send_seconds: float,
        cleanup: Callable[[], None],
        headers: dict[str, str] | None = None,
    ):
        super().__init__(events, headers=headers, ping=0, sep="\n", send_timeout=send_seconds)
        self._cleanup = cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            pass
        finally:
            self._cleanup()
