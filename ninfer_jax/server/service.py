"""The state that all routes share: settings, the engine once it is there, and whether requests are taken."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from ninfer_jax.server.backend import Backend
from ninfer_jax.server.errors import ApiError
from ninfer_jax.server.metrics import Metrics

T = TypeVar("T")
# Where clients put the name of a conversation, most specific first: Claude Code, Codex, OpenCode, others.
_SESSION_HEADERS = (
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "conversation_id",
    "x-opencode-session",
    "x-session-affinity",
    "x-session-id",
)


@dataclass(frozen=True)
class Settings:
    """The options of `ninfer-jax serve`.

    model_id: the name in `/v1/models`; aliases: other names that requests may use, "*" allows any. api_keys: empty lets everybody
    in. lenient: unknown fields are left out instead of refused. max_body: bytes. body_seconds: until a body has to be complete.
    heartbeat: seconds of silence after which a stream gets a sign of life. send_seconds: until a reader has to take a piece.
    drain_seconds: for running answers after SIGTERM. cors: origins that browsers may call from. keep_nonces: leave the line that
    Claude Code puts before its system text, with a number that changes every time, in the prompt.
    """

    model_id: str
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    lenient: bool = False
    max_body: int = 32 << 20
    body_seconds: float = 60.0
    heartbeat: float = 5.0
    send_seconds: float = 60.0
    drain_seconds: float = 30.0
    cors: tuple[str, ...] = ()
    keep_nonces: bool = False


class Phase(Enum):
    """Stages of the life of a process."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass(eq=False)
class Service:
    """settings and engine of one process. progress: stage -> (done, total) while it loads. running: answers under way.

    joules: tells what the card has taken so far, where something does. memory: `{"total": bytes, "parts": {name: bytes}}`.
    """

    settings: Settings
    backend: Backend | None = None
    metrics: Metrics = field(default_factory=Metrics)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    phase: Phase = Phase.LOADING
    failure: str = ""
    running: int = 0
    joules: Callable[[], float] | None = None
    memory: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        # Rendering and tokenising: two at a time, so that a flood of long prompts leaves the loop's own threads alone.
        self._threads = ThreadPoolExecutor(2, "ninfer-text")
        if self.backend is not None:
            self.ready(self.backend)

    def ready(self, backend: Backend) -> None:
        """From now on requests are answered."""
        self.backend = backend
        self.metrics.attach(backend.load)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    @property
    def engine(self) -> Backend:
        """The engine; ApiError 503 while there is none, or no more."""
        if self.phase is Phase.DRAINING:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=10)
        if self.backend is None:
            stage, (done, total) = next(reversed(self.progress.items()), ("start", (0, 0)))
            said = f"the model is loading: {stage} {100 * done // total if total else 0} %"
            raise ApiError(503, said if not self.failure else "the model could not be loaded", code="model_loading", retry_after=5)
        return self.backend

    def check_model(self, name: str | None) -> str:
        """The name to answer with; ApiError 404 for a model that is not here."""
        settings = self.settings
        if name is None or name == settings.model_id:
            return settings.model_id
        if name in settings.aliases or "*" in settings.aliases:
            return name
        raise ApiError(
            404,
            f"model: {name!r} is not served here, {settings.model_id!r} is (ninfer-jax serve --alias gives it other names)",
            param="model",
            code="model_not_found",
        )

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Its result, computed off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def session_of(headers: dict[str, str], key: str | None) -> str | None:
    """A short name of the conversation that a request belongs to: of its `prompt_cache_key`, else of its client's header."""
    named = key or next((headers[name] for name in _SESSION_HEADERS if headers.get(name)), None)
    return None if named is None else hashlib.blake2b(named.encode("utf-8", "replace"), digest_size=8).hexdigest()
