"""The engine as the server sees it: requests in, pieces out, and the numbers of the dashboard. `engine.AsyncEngine` is one.

The server programs against these protocols, so that its tests run on a script instead of a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ninfer_jax.decoding import SamplingParams
    from ninfer_jax.engine.load import Load
    from ninfer_jax.engine.results import Completion
    from ninfer_jax.text import CheckpointText


class Piece(Protocol):
    """A round's tokens, and their logprobs if they were asked for: `engine.Delta`. The last piece has the completion, others None.

    Text is made of the tokens by the server: stop strings, reasoning and calls are its business.
    """

    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[Any]: ...
    @property
    def completion(self) -> Completion | None: ...


class Running(Protocol):
    """One request in the engine: its pieces, once, or AnswerLost. Cancelling it is safe at any time and more than once."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...
    def cancel(self) -> None: ...


class Backend(Protocol):
    """An engine that takes requests from the event loop's thread and answers them elsewhere.

    context: tokens that a prompt and its answer may have together. describe: what `/v1/models` tells of the model.
    """

    @property
    def text(self) -> CheckpointText: ...
    @property
    def context(self) -> int: ...

    def default_params(self, **changes: Any) -> SamplingParams: ...

    def submit(
        self, prompt: list[int], params: SamplingParams, *, session: str | None = None, snapshots: Sequence[int] = ()
    ) -> Running:
        """The request, queued. session: requests of one conversation have the same. snapshots: prompt lengths at which the
        client asks for a cache entry. ValueError for what cannot be computed, QueueFull, EngineStopped."""
        ...

    def load(self) -> Load: ...
    def describe(self) -> dict[str, Any]: ...

    def close(self, save: bool = True) -> bool:
        """End: running requests are cancelled, the cache is saved if it has a directory. Blocks for a bounded time."""
        ...
