"""A server on a scripted engine: in the process for httpx, and on a port of loopback for the real SDKs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from server.scripted import Scripted
from starlette.testclient import TestClient

from ninfer_jax.server import Service, Settings, build_app

HELLO = "I am thinking.\n</think>\n\nHello there!<|im_end|>"


@pytest.fixture
def make() -> Callable[..., tuple[TestClient, Scripted, Service]]:
    """(client, engine, service) for a script; other arguments are the engine's or, in `settings`, the server's."""

    def built(script: Callable[[str], str] | str = HELLO, settings: dict[str, Any] | None = None, **engine: Any) -> Any:
        scripted = Scripted(script if callable(script) else lambda _: script, **engine)
        service = Service(Settings("tiny", **(settings or {})), scripted)
        return TestClient(build_app(service), raise_server_exceptions=False), scripted, service

    return built


@contextmanager
def on_a_port(service: Service, http: Any = "h11") -> Iterator[str]:
    """The address of a server in a thread of its own."""
    server = uvicorn.Server(uvicorn.Config(build_app(service), port=0, log_level="warning", http=http))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
