"""Pieces of an answer on their way from the engine's thread to one reader, in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from ninfer_jax.engine.results import Delta


class Channel:
    """Pieces that are put in and not yet taken, as one. The writer never waits: a slow reader gets larger pieces, and all of them
    together are no more than the answer. A reader is woken once, however much has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[Delta] = []
        self._error: Exception | None = None
        self._wake: Callable[[], None] | None = None

    def put(self, piece: Delta) -> bool:
        """Add `piece`; whether there is still somebody who could read it."""
        with self._lock:
            self._pieces.append(piece)
        return self._tell()

    def fail(self, error: Exception) -> bool:
        """Have the reader raise `error` after what there is; returns as `put`."""
        with self._lock:
            self._error = error
        return self._tell()

    def take(self) -> Delta | None:
        """All that has come since the last call; None for nothing. Raises what `fail` was given once all is taken."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
            if not pieces and self._error is not None:
                raise self._error
        return joined(pieces) if pieces else None

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is something to take, or for `timeout` seconds; whether there is."""
        event = threading.Event()
        if not self._arm(event.set):
            return True
        try:
            return event.wait(timeout)
        finally:
            self._wake = None

    async def wait_async(self) -> None:
        """Return when there is something to take."""
        loop = asyncio.get_running_loop()
        come: asyncio.Future[None] = loop.create_future()

        def set_result() -> None:
            if not come.done():
                come.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(set_result)

        if self._arm(wake):
            try:
                await come
            finally:
                self._wake = None

    def _arm(self, wake: Callable[[], None]) -> bool:
        with self._lock:
            if self._pieces or self._error is not None:
                return False
            if self._wake is not None:
                raise RuntimeError("an answer has one reader, and this one has another already")
            self._wake = wake
            return True

    def _tell(self) -> bool:
        with self._lock:
            wake, self._wake = self._wake, None
        try:
            if wake is not None:
                wake()
        except RuntimeError:  # its event loop is closed
            return False
        return True


def joined(pieces: Sequence[Delta]) -> Delta:
    """One piece that says what `pieces` say."""
    if len(pieces) == 1:
        return pieces[0]
    return Delta(
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        [entry for piece in pieces for entry in piece.logprobs],
        pieces[-1].completion,
    )
