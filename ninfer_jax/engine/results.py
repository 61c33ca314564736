"""Answers as a caller gets them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field


class AnswerLost(RuntimeError):
    """An answer that cannot go on, because the device state it was computed in is gone: an exception came while the
    engine was at work, most likely out of another request's call. Asking again gives the whole answer."""

    def __init__(self, cause: str):
        super().__init__(f"the answer is lost: the engine was stopped at work by {cause}; ask again")


def first_line(error: BaseException) -> str:
    """Name and message of an exception, of which the first line."""
    return traceback.format_exception_only(error)[0].splitlines()[0]


class QueueFull(RuntimeError):
    """A request that was not taken, because too many are waiting. retry_after: seconds after which to ask again makes sense."""

    def __init__(self, waiting: int, retry_after: float = 5.0):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after:g} s")
        self.retry_after = retry_after


class EngineStopped(RuntimeError):
    """An engine that takes no requests any more: it was closed, or its device failed for good."""


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token, its natural log-probability under the unmodified distribution, and the most likely
    alternatives as (token id, log-probability), most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Stats:
    """Work and time of one completion.

    queue_s: seconds from the request to its first chunk; first_token_s: from the request to its first token. prefill_s: from the
    first chunk to the first token; decode_s: from then to the last token. cached_tokens: of the prompt, those without a prefill.
    rounds: decode rounds this sequence took part in. drafted, accepted: tokens proposed and those among them that became
    output. compilations: programs compiled since the engine started to load; it stands still in service.
    kv_bytes_per_token: bytes that the attention layers' pages hold for a token, without the MTP layer's own.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    compilations: int = 0
    kv_bytes_per_token: int = 0


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    tokens: every generated id, an end token included. text: the answer; reasoning: what stood in `<think>`.
    finish_reason: "stop" (an end token, or a stop string), "length" (max_new_tokens or the context is used up), "grammar" (its
    grammar came to a limit; `error` is one line why), "cancelled" (taken out before its end), "deadline" (its time was up before
    that) or "lost" (see `AnswerLost`).
    logprobs: one entry a token if they were asked for, else None.
    """

    tokens: list[int]
    text: str
    reasoning: str
    finish_reason: str
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None
    stats: Stats
    error: str = ""


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it is produced. logprobs: one entry a token if they were asked for. The last piece carries the whole
    `completion`; the others None. The sum of two is one piece."""

    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion: Completion | None = None

    def __add__(self, later: Delta) -> Delta:
        return Delta(
            self.text + later.text,
            self.reasoning + later.reasoning,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            later.completion,
        )

    def __bool__(self) -> bool:
        """Something is said."""
        return bool(self.text or self.reasoning or self.tokens or self.completion)
