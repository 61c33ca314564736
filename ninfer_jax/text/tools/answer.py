"""An answer's text, while it arrives, as reasoning, content and tool calls, and how it ended."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ninfer_jax.text.reasoning import ReasoningSplitter
from ninfer_jax.text.stop import StopMatcher
from ninfer_jax.text.tools.calls import CallParser
from ninfer_jax.text.tools.events import CallBegin, CallEnd, ContentText, Event, ReasoningText
from ninfer_jax.text.tools.values import WHITE

CLOSE_REASONING = "\n</think>\n\n"  # what the template writes behind reasoning


@dataclass(frozen=True)
class Outcome:
    """The end of an answer.

    reason: "stop", "length" or "tool_calls", as the chat API names them. "length" wins over the others: an answer that was cut off,
        or that ended inside its reasoning or inside a call's value, is never reported as a complete one.
    stop: the stop string that ended it, or None.
    calls, incomplete: how many calls began, and how many of them lack arguments.
    malformed: how many `<tool_call>` became text, in an answer that was read to its end.
    unanswered: it ended by itself with reasoning at most: no content but white space, and no call.
    in_reasoning: it ended, or was cut, before its `</think>`.
    """

    reason: str
    stop: str | None = None
    calls: int = 0
    incomplete: int = 0
    malformed: int = 0
    unanswered: bool = False
    in_reasoning: bool = False


class AnswerParser:
    """Turns the text of one answer into events; what they say does not depend on how the text is cut.

    - Reasoning is what `ReasoningSplitter` says. A tool call inside it counts if the turn ends right behind it, without a
      `</think>`: models forget the tag. Any other stays reasoning.
    - Stop strings are looked for in content alone: neither in reasoning nor in calls, nor across a call.
    - A turn that ends inside reasoning has no answer. Ask `open_reasoning` before `finish`: the turn can go on from
      `CLOSE_REASONING`, pushed here and appended to the prompt. Otherwise the outcome says `unanswered` and "length".
    """

    def __init__(
        self,
        start_in_reasoning: bool,
        tools: Mapping[str, object] | None = None,
        stop: Sequence[str] = (),
        max_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ):
        """tools: name -> JSON schema of its parameters, of those that may be called. max_calls: the answer is over after so many.
        ValueError for bad stop strings."""
        self._splitter = ReasoningSplitter(start_in_reasoning)
        self._thoughts = _Thoughts(tools or {}, new_id)
        self._answer = CallParser(tools or {}, new_id)
        self._stop, self._stops = tuple(stop), StopMatcher(stop)
        self._max_calls = max_calls
        self._calls = self._incomplete = 0
        self._said = self._done = False
        self.outcome: Outcome | None = None

    @property
    def done(self) -> bool:
        """Whether nothing can follow: a stop string has come, the last call allowed has ended, or `finish` was called."""
        return self._done

    @property
    def in_reasoning(self) -> bool:
        """Whether the text that arrives next is reasoning, as far as is known."""
        return self._splitter.in_reasoning

    @property
    def open_reasoning(self) -> bool:
        """Whether a turn that ended here would have reasoning and nothing else."""
        return self._splitter.in_reasoning and not self._thoughts.calling

    def push(self, text: str) -> list[Event]:
        """The events that are certain now; none once the answer is done."""
        if self._done:
            return []
        piece = self._splitter.push(text)
        return self._split(piece.reasoning, piece.answer)

    def finish(self, cut: bool = False) -> list[Event]:
        """Ends the answer; `outcome` is there then. cut: it did not end by itself (a limit on its length)."""
        if self.outcome is not None:
            return []
        events: list[Event] = []
        inside = self._splitter.in_reasoning
        if not self._done:
            piece = self._splitter.flush()
            events = self._split(piece.reasoning, piece.answer, keep=True)
            if inside:
                text, calls = self._thoughts.finish(cut)
                events += [*_reasoning(text), *self._keep(calls)]
            events += self._keep(self._answer.finish(cut))
            events += self._flush_stop()
        self.outcome = self._outcome(cut and not self._done, inside)
        self._done = True
        return events

    def _outcome(self, cut: bool, inside: bool) -> Outcome:
        inside = inside and not self._calls
        unanswered = not (cut or self._calls or self._said) and self._stops.matched is None
        whole = not (cut or self._incomplete or (inside and unanswered))
        reason = "length" if not whole else "tool_calls" if self._calls else "stop"
        malformed = 0 if self._done else self._answer.malformed
        return Outcome(reason, self._stops.matched, self._calls, self._incomplete, malformed, unanswered, inside)

    def _split(self, reasoning: str, answer: str, keep: bool = False) -> list[Event]:
        events = _reasoning(self._thoughts.push(reasoning)) if reasoning else []
        if not (self._splitter.in_reasoning or keep):
            events += _reasoning(self._thoughts.close())
        return events + (self._keep(self._answer.push(answer)) if answer else [])

    def _keep(self, events: Sequence[Event]) -> list[Event]:
        """The part to keep of the content parser's events: up to a stop string, or to the last call allowed."""
        kept: list[Event] = []
        for event in events:
            if self._done:
                break
            if isinstance(event, ContentText):
                text, self._done = self._stops.push(event.text)
                kept += self._content(text)
                continue
            if isinstance(event, CallBegin):
                kept += self._flush_stop()
                self._stops = StopMatcher(self._stop)
                self._calls += 1
            kept.append(event)
            if isinstance(event, CallEnd):
                self._incomplete += not event.complete
                self._done = self._max_calls is not None and self._calls >= self._max_calls
        return kept

    def _flush_stop(self) -> list[Event]:
        return self._content(self._stops.flush())

    def _content(self, text: str) -> list[Event]:
        self._said = self._said or bool(text.strip(WHITE))
        return [ContentText(text)] if text else []


class _Thoughts:
    """Reasoning in which a tool call may come. Such a call, and what follows it, is held back until the turn ends behind it or
    other text follows."""

    def __init__(self, tools: Mapping[str, object], new_id: Callable[[], str] | None):
        self._tools, self._parser = tools, CallParser(tools, new_id)
        self._held, self._released = "", 0
        self._calls: list[Event] = []

    @property
    def calling(self) -> bool:
        """Whether a call has come, and nothing but white space behind it, should the turn end here."""
        return bool(self._whole(self._calls + copy.deepcopy(self._parser).finish(False)))

    def push(self, text: str) -> str:
        """The text that is certain to be reasoning."""
        if not self._tools:
            return text
        self._held += text
        events = self._parser.push(text)
        released = ""
        if last := next((i for i in range(len(events), 0, -1) if isinstance(events[i - 1], ContentText)), 0):
            # Text that is no call: calls ahead of it were only thought of.
            until = self._parser.said - self._released
            released, self._held, self._calls = self._held[:until], self._held[until:], []
            self._released += until
        self._calls += events[last:]
        return released

    def close(self) -> str:
        """Ends the reasoning at its `</think>`: what is held is part of it."""
        held, self._held, self._calls = self._held, "", []
        return held

    def finish(self, cut: bool) -> tuple[str, list[Event]]:
        """(text that is reasoning, events of calls) where the turn ends inside the reasoning."""
        calls = [] if cut else self._whole(self._calls + self._parser.finish(False))
        held = self.close()
        return ("", calls) if calls else (held, [])

    def _whole(self, events: list[Event]) -> list[Event]:
        """The calls, counted from 0, if the events are complete calls and nothing else."""
        calls = [event for event in events if not isinstance(event, ContentText | ReasoningText)]
        if len(calls) < len(events) or not all(getattr(event, "complete", True) for event in calls):
            return []
        return [replace(event, index=event.index - calls[0].index) for event in calls]


def _reasoning(text: str) -> list[Event]:
    return [ReasoningText(text)] if text else []
