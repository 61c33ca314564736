"""Answers gathered whole, for requests that do not stream, and what all APIs say about tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ninfer_jax.server.answer import Answer, Ending
from ninfer_jax.text import Tokenizer
from ninfer_jax.text.tools import CallArguments, CallBegin, ContentText, Event, ReasoningText

if TYPE_CHECKING:
    from ninfer_jax.engine.results import TokenLogprob


@dataclass
class Call:
    """One tool call; arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Whole:
    """An answer with all its parts."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, events: list[Event]) -> None:
        """Append what the events say."""
        for event in events:
            if isinstance(event, ReasoningText):
                self.reasoning += event.text
            elif isinstance(event, ContentText):
                self.text += event.text
            elif isinstance(event, CallBegin):
                self.calls.append(Call(event.id, event.name))
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments += event.delta


async def gather(answer: Answer) -> Whole:
    """The whole answer."""
    whole = Whole()
    async for step in answer.steps():
        whole.add(step.events)
        whole.tokens += step.tokens
        whole.logprobs += step.logprobs
        whole.ending = step.ending
    return whole


def token_logprob(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """One entry of OpenAI's `logprobs.content`."""
    top = [_logprob(tokenizer, token, value) for token, value in entry.top]
    return _logprob(tokenizer, entry.token, entry.logprob) | {"top_logprobs": top}


def _logprob(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    data = tokenizer.decode_bytes([token], skip_special=False)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(value, -9999.0), "bytes": list(data)}
