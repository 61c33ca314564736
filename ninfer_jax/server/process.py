"""One process: its port is open at once, the model loads beside it, and a signal ends both within a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ninfer_jax.server.app import build_app
from ninfer_jax.server.backend import Backend
from ninfer_jax.server.service import Phase, Service

Progress = Callable[[str, int, int], None]
HEADER_SECONDS = 30.0  # from a connection's first byte to the end of its headers
_HEADER_BYTES = 64 << 10
_CONNECTIONS = 1000
_KEEP_ALIVE = 75  # seconds; longer than clients keep theirs, so that none sends into a connection that is just being closed
_LAST_WORDS = 5  # seconds for streams that have ended to be read to their ends


@dataclass(frozen=True)
class Ended:
    """The end of a process. loading: the thread that loads the model has not finished and will not."""

    loading: bool


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. OSError, one line, for an address that cannot be had; ValueError for a port that is none."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port is {port}, it must be from 0 (any that is free) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(f"--host {host}: {error.strerror or error}") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        reason = "it is taken" if error.errno == 98 else (error.strerror or str(error))
        raise OSError(f"{host} port {port}: {reason} (--port takes another, 0 any that is free)") from None
    return found


def url_of(listening: socket.socket) -> str:
    """`http://127.0.0.1:8080`."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(service: Service, listening: socket.socket, load: Callable[[Progress], Backend], say: Callable[[str], None]) -> Ended:
    """Serve until SIGTERM or SIGINT. What `load` raises is raised here, once the port is closed.

    load: makes the engine, in a thread of its own; it is told how to report (stage, done, in all). say: takes lines for people.
    A signal lets running answers go on for `drain_seconds`; a second one, not.
    """
    # The engine's thread comes back from the device many times a second and must not wait 5 ms, Python's default, for one that
    # renders a long prompt.
    sys.setswitchinterval(5e-4)
    return asyncio.run(_run(service, listening, load, say))


async def _run(
    service: Service, listening: socket.socket, load: Callable[[Progress], Backend], say: Callable[[str], None]
) -> Ended:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    server = serve_in(service)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    loading, stopped = _started(loop, service, load), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.ready(loading.result())
            say("ready")
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        await _drain(service, hurry, say)
    except BaseException as error:
        service.phase, service.failure = Phase.FAILED, type(error).__name__
        raise
    finally:
        stopped.cancel()
        server.should_exit = True
        await serving
    return Ended(loading=not loading.done())


async def _drain(service: Service, hurry: asyncio.Event, say: Callable[[str], None]) -> None:
    """No new answers; those that run may go on for a while, and are then told that the server stops."""
    service.phase = Phase.DRAINING
    if service.running:
        say(f"stopping; {service.running} answers have {service.settings.drain_seconds:g} s more (a second signal ends them now)")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(service.settings.drain_seconds):
            while service.running and not hurry.is_set():
                await asyncio.sleep(0.05)
    if service.backend is not None:
        await asyncio.to_thread(service.backend.close)


def _started(loop: asyncio.AbstractEventLoop, service: Service, load: Callable[[Progress], Backend]) -> asyncio.Future[Backend]:
    """The engine, once it is there. The thread is a daemon: compiling cannot be interrupted, and the end of the process must not
    wait for it."""
    future: asyncio.Future[Backend] = loop.create_future()

    def progress(stage: str, done: int, total: int) -> None:
        service.progress[stage.partition(":")[0]] = (done, total)

    def settle(backend: Backend | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif backend is not None:
            future.set_result(backend)

    def work() -> None:
        backend, error = None, None
        try:
            backend = load(progress)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, backend, error)

    threading.Thread(target=work, name="ninfer-load", daemon=True).start()
    return future


def serve_in(service: Service) -> uvicorn.Server:
    """The server of a service, for the event loop that awaits its `serve`; it leaves signals alone."""
    return _Server(
        uvicorn.Config(
            build_app(service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_LAST_WORDS,
            timeout_keep_alive=_KEEP_ALIVE,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are dealt with here, by `_run`."""
        yield


class Connection(H11Protocol):
    """A connection whose headers have to be complete in time: one that sends them byte by byte holds its place no longer."""

    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Also a connection that never says anything is closed."""
        super().connection_made(transport)
        self._headers_due = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """The clock runs while a request has begun that is not there yet."""
        if self._headers_due is None and not self._answering:
            self._headers_due = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        super().data_received(data)
        if self._answering:
            self._stop_clock()

    @property
    def _answering(self) -> bool:
        cycle: Any = self.cycle  # None at first, whatever its type says
        return cycle is not None and not cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, of the clock too."""
        self._stop_clock()
        super().connection_lost(exc)

    def _stop_clock(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
