"""One engine of a fleet: the server's application over it, and what it reports to routers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ninfer_jax.fleet.affinity import Affinity, Answered
from ninfer_jax.fleet.call import Call, Head, answered
from ninfer_jax.fleet.reports import Report
from ninfer_jax.server import Backend, Service, Settings, build_app
from ninfer_jax.server.service import Phase

NAME_HEADER = b"x-ninfer-replica"
Load = Callable[[Service, str], Backend]


class Replica:
    """An engine that is loaded, so that whoever starts it may call it ready. name: the same after a restart, so that the cache on
    disk is found again. load: makes the engine."""

    def __init__(self, settings: Settings, load: Load, name: str):
        self.name, self.service = name, Service(settings)
        self.service.ready(load(self.service, name))
        self._app = build_app(self.service)
        self._answered, self._requests, self._serial = Answered(), 0, 0

    async def answer(self, call: Call, affinity: Affinity) -> AsyncGenerator[Head | bytes, None]:
        """The application's answer."""
        self._requests += 1
        try:
            async with aclosing(answered(self._app, call, ((NAME_HEADER, self.name.encode()),))) as parts:
                async for part in parts:
                    if isinstance(part, Head) and part.status == 200 and affinity.key is not None:
                        self._answered.add(affinity.chain)
                    yield part
        finally:
            self._requests -= 1

    def routing(self) -> dict[str, object]:
        """What routers go by. serial: a larger one is newer."""
        self._serial += 1
        slots = len(self.service.engine.load().slots)
        prefixes = self._answered.digests()
        return {"name": self.name, "serial": self._serial, "slots": slots, "requests": self._requests, "prefixes": prefixes}

    async def report(self) -> Report:
        """Metrics and status, from its own application's routes."""
        service = self.service
        key = ((b"authorization", f"Bearer {service.settings.api_keys[0]}".encode()),) if service.settings.api_keys else ()
        async with aclosing(answered(self._app, Call("GET", "/api/status", b"", key))) as parts:
            said = b"".join([part.body if isinstance(part, Head) else part async for part in parts])
        return Report(self.name, service.metrics.text().decode(), json.loads(said))

    async def close(self) -> None:
        """The end: what runs has been waited for by whoever stops replicas, or is cancelled; the cache is saved."""
        service = self.service
        service.phase = Phase.DRAINING
        ends = time.monotonic() + service.settings.drain_seconds
        while service.running and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        if service.backend is not None:
            await asyncio.to_thread(service.backend.close)
