"""Tool calls in an answer's text, read while it arrives.

The form, as the Qwen templates write it and ask for it:

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>

What an event says never depends on how the text was cut into pieces, only when it comes. A decision is taken once the text that
it needs is there; until then text is held back.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ninfer_jax.text.tools.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from ninfer_jax.text.tools.values import WHITE, Unfit, dumped, parameter_names, parameter_schema, typed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_CLOSERS = (END_PARAMETER, END_FUNCTION, CLOSE)
_TAGS = (OPEN, PARAMETER, *_CLOSERS)
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_BLANK = re.compile(f"[{WHITE}]*")
_LONGEST = max(map(len, _TAGS))
_MAX_NAME = 256
_INDENT = 64  # of a tag at the beginning of its line


class _State(Enum):
    TEXT = auto()
    BODY = auto()  # of a function, between its parameters
    VALUE = auto()
    AFTER = auto()  # behind a call: white space and closing tags too many belong to it


class _Seen(Enum):
    """Verdicts of the text behind a possible closing tag on it."""

    WAIT = auto()  # more text is needed
    STRONG = auto()  # it closes
    CLOSED = auto()  # the call is closed in full behind it, but prose follows
    WEAK = auto()  # other text follows: it may belong to the value


@dataclass
class _Call:
    name: str
    parameters: object
    names: frozenset[str]
    index: int | None = None  # once it has begun
    given: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)
    key: str = ""
    # Inside a value: where it begins, how far it has been searched, and (its end, where to go on) if no better close comes.
    value: int = 0
    searched: int = 0
    closed: tuple[int, int] | None = None
    weak: tuple[int, int] | None = None
    implicit: tuple[int, int] | None = None


class CallParser:
    """Turns text into content and tool calls.

    A call begins with its first value that fits the tool's schema, or with its end where it has none; its arguments come one
    parameter at a time, each whole. Until it begins it may turn out to be text: an unknown function, a malformed tag, a value that
    no type fits, no closing tag at all. Then it is content, letter by letter. Once it has begun, what cannot be read is left
    out and named in its `CallEnd`.

    - Closing tags may be missing or doubled. White space between text and calls is dropped, so is that behind a call.
    - A `</parameter>` closes if another tag of the format or the end of the turn follows. Before anything else it is part of
      the value, provided that a tag that closes comes later in the turn, ahead of another call. A value that holds the
      format's own sequence of tags, with a tag behind it again, ends there: that cannot be told from two values.
    - A parameter given a second time is dropped.

    Without tools all text is content, unchanged.

    begun, malformed: how many calls have begun, and how many `<tool_call>` became text.
    said: where in all the text pushed the last `ContentText` ends.
    """

    def __init__(self, tools: Mapping[str, object], new_id: Callable[[], str] | None = None):
        """tools: name -> JSON schema of its parameters. new_id: makes the ids of calls."""
        self._tools = tools
        self._new_id = new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._state = _State.TEXT
        self._text = ""  # not yet done with; positions below count in it
        self._at = 0
        self._call: _Call | None = None
        self._events: list[Event] = []
        self._end = self._cut = False
        self.begun = self.malformed = self.said = self._dropped = 0

    @property
    def in_call(self) -> bool:
        """Whether the text that arrives next belongs to a call, as far as is known."""
        return self._call is not None

    def push(self, text: str) -> list[Event]:
        """The events that are certain now."""
        if not self._tools:
            return [ContentText(text)] if text else []
        self._text += text
        return self._run()

    def finish(self, cut: bool) -> list[Event]:
        """The remaining events. cut: the turn did not end here, it was cut off (by a limit): an open call is not complete."""
        self._end, self._cut = True, cut
        return self._run()

    def _run(self) -> list[Event]:
        steps = {_State.TEXT: self._in_text, _State.BODY: self._in_body, _State.VALUE: self._in_value, _State.AFTER: self._after}
        while steps[self._state]():
            pass
        events, self._events = self._events, []
        return events

    # Each step returns whether another one can follow.

    def _in_text(self) -> bool:
        text = self._text
        start = text.find(OPEN, self._at)
        if start < 0:
            kept = len(text) if self._end else _sure(text, OPEN)
            self._say(kept)
            return False
        name = self._header(start + len(OPEN))
        if name is None:
            self._say(_before(text, start))
            return False
        match, end = name
        if not match:
            self.malformed += 1
            self._at = start + len(OPEN)  # the tag is text
            return True
        self._say(_before(text, start))
        shift = len(text) - len(self._text)
        self._call = _Call(match, self._tools[match], parameter_names(self._tools[match]))
        self._at, self._state = end - shift, _State.BODY
        return True

    def _header(self, at: int) -> tuple[str, int] | None:
        """(the known function named behind a `<tool_call>` or "", where its tag ends); None if that is not certain yet."""
        text, at = self._text, self._skip(at)
        if not text.startswith(FUNCTION, at):
            return None if not self._end and _unfinished(text, at, (FUNCTION,)) else ("", at)
        found = _name(text, at + len(FUNCTION))
        if found is None:
            return ("", at) if self._end else None
        name, end = found
        return (name if name in self._tools else "", end)

    def _in_body(self) -> bool:
        call, text = self._opened(), self._text
        self._at = at = self._skip(self._at)
        tag = next((tag for tag in _TAGS if text.startswith(tag, at)), None)
        if tag == PARAMETER:
            found = _name(text, at + len(PARAMETER))
            if found is None and not self._end:
                return False
            if found is None and self._cut:
                return self._ended()
            if found and found[0]:
                call.key, call.value = found
                call.searched, call.closed, call.weak, call.implicit = call.value, None, None, None
                self._at, self._state = call.value, _State.VALUE
                return True
            return self._junk()
        if tag == END_PARAMETER:
            self._at += len(tag)
            return True
        if tag in (END_FUNCTION, CLOSE):
            self._begin()
            self._at += len(tag)
            return self._close(True)
        if tag == OPEN:
            return self._close(True) if call.index is not None else self._give_up()
        if _unfinished(text, at, _TAGS):
            return self._end and self._ended()
        return self._junk()

    def _ended(self) -> bool:
        """The turn ends between two parameters."""
        if self._opened().index is None and not self._cut:
            return self._give_up()
        self._begin()
        self._at = len(self._text)
        return self._close(not self._cut)

    def _junk(self) -> bool:
        """Steps over what is no tag between parameters: the call is text, or, once begun, goes on with the next tag."""
        call, text = self._opened(), self._text
        if call.index is None:
            return self._give_up()
        found = _TAG.search(text, self._at + 1)
        if found is None and not self._end:
            return False
        end = found.start() if found else len(text)
        call.dropped.append(text[self._at : end].strip(WHITE))
        self._at = end
        return True

    def _in_value(self) -> bool:
        call = self._opened()
        ended = self._value_end()
        if ended is None:
            if not self._end:
                return False
            if call.index is None and not self._cut:
                return self._give_up(len(self._text))
            self._begin()
            call.dropped.append(call.key)
            self._at = len(self._text)
            return self._close(False)
        value = _framed(self._text[call.value : ended[0]])
        try:
            if call.key in call.given:
                raise Unfit("given twice")
            argument = dumped(typed(value, parameter_schema(call.parameters, call.key), call.parameters))
        except Unfit:
            if call.index is None:
                return self._give_up(ended[0])
            call.dropped.append(call.key)
        else:
            self._begin()
            self._events.append(CallArguments(call.index or 0, f"{', ' if call.given else ''}{dumped(call.key)}: {argument}"))
            call.given.add(call.key)
        self._at, self._state = ended[1], _State.BODY
        self._drop(self._at)
        return True

    def _value_end(self) -> tuple[int, int] | None:
        """(where the value ends, where to go on); None if that is not certain yet or, at the end, if nothing closes it."""
        call, text = self._opened(), self._text
        while found := _TAG.search(text, call.searched):
            tag, start, end = found[0], found.start(), found.end()
            at_line = _begins_line(text, start, call.value)
            seen = _Seen.WEAK
            if tag == END_PARAMETER:
                seen = self._behind(end, False)
                at = (start, end)
            else:
                at = (start, start)
                if tag == PARAMETER and at_line:
                    name = _name(text, end)
                    if name is None and not self._end:
                        return None
                    new = name and name[0] in call.names and name[0] not in {*call.given, call.key}
                    seen = _Seen.STRONG if new else seen
                elif tag in (END_FUNCTION, CLOSE) and at_line:
                    seen = self._behind(end, True)
                elif tag == OPEN and (before := call.weak or call.implicit):
                    header = self._header(end)
                    if header is None:
                        return None
                    if header[0]:
                        return before
            if seen is _Seen.WAIT:
                return None
            if seen is _Seen.STRONG:
                return at
            if tag == END_PARAMETER:
                call.weak = at
                call.closed = at if seen is _Seen.CLOSED else call.closed
            elif seen is _Seen.CLOSED:
                call.implicit = call.implicit or at
            call.searched = end
        call.searched = max(call.searched, len(text) - _LONGEST + 1)
        if not self._end:
            return None
        return (call.closed if self._cut else call.weak) or call.implicit

    def _behind(self, at: int, closed: bool) -> _Seen:
        """The verdict of the text from `at` on about a closing tag before it; closed: that was one of the function or the call."""
        text, sure = self._text, not self._cut  # one tag at the end of a text that was cut may be the value's own
        while True:
            at = self._skip(at)
            tag = next((tag for tag in _TAGS if text.startswith(tag, at)), None)
            if tag is None:
                if _unfinished(text, at, _TAGS) and not (self._end and not sure):
                    return _Seen.STRONG if self._end else _Seen.WAIT
                return _Seen.CLOSED if closed else _Seen.WEAK
            if tag == OPEN or (tag == PARAMETER and not closed):
                return _Seen.STRONG
            if tag == PARAMETER:
                return _Seen.CLOSED
            closed, sure = closed or tag != END_PARAMETER, sure or tag != END_PARAMETER
            at += len(tag)

    def _after(self) -> bool:
        text = self._text
        self._at = at = self._skip(self._at)
        if at < len(text):
            tag = next((tag for tag in _CLOSERS if text.startswith(tag, at)), None)
            if tag:
                self._at += len(tag)
                return True
            if not _unfinished(text, at, _CLOSERS):
                self._drop(at)
                self._state = _State.TEXT
                return True
            if not self._end:
                return False
        self._drop(len(text) if self._end else at)
        return False

    def _begin(self) -> None:
        call = self._opened()
        if call.index is None:
            call.index, self.begun = self.begun, self.begun + 1
            self._events += [CallBegin(call.index, self._new_id(), call.name), CallArguments(call.index, "{")]

    def _close(self, complete: bool) -> bool:
        call = self._opened()
        index = call.index or 0
        self._events += [CallArguments(index, "}"), CallEnd(index, complete, tuple(call.dropped))]
        self._call, self._state = None, _State.AFTER
        return True

    def _give_up(self, until: int | None = None) -> bool:
        """The call is text after all, as far as it was read: nothing in it is looked at again, so the work stays linear."""
        self._at, self._call, self._state = self._at if until is None else until, None, _State.TEXT
        self.malformed += 1
        return True

    def _opened(self) -> _Call:
        assert self._call is not None
        return self._call

    def _say(self, until: int) -> None:
        if until:
            self._events.append(ContentText(self._text[:until]))
            self.said = self._dropped + until
            self._drop(until)

    def _drop(self, until: int) -> None:
        self._dropped += until
        self._text, self._at = self._text[until:], max(self._at - until, 0)

    def _skip(self, at: int) -> int:
        found = _BLANK.match(self._text, at)
        return found.end() if found else at


def _sure(text: str, tag: str) -> int:
    """Length of the text that is no part of a tag at its end, nor white space before one."""
    tail = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return _before(text, len(text) - tail)


def _before(text: str, at: int) -> int:
    """The place where the white space before a place begins."""
    return len(text[:at].rstrip(WHITE))


def _unfinished(text: str, at: int, tags: tuple[str, ...]) -> bool:
    """Whether the text ends at a place, or inside a tag that begins there."""
    return len(text) - at < _LONGEST and any(tag.startswith(text[at:]) for tag in tags)


def _name(text: str, at: int) -> tuple[str, int] | None:
    """(the name in a tag, or "" if that is none, where the tag ends); None if more text is needed."""
    end = next((i for i in range(at, min(len(text), at + _MAX_NAME + 1)) if text[i] in "<>\n"), None)
    if end is None:
        return None if len(text) <= at + _MAX_NAME else ("", at)
    name = text[at:end].strip(WHITE)
    return (name, end + 1) if text[end] == ">" and name and name[-1] != "=" else ("", at)


def _begins_line(text: str, at: int, first: int) -> bool:
    """Whether only blanks stand between a place and the line's beginning, or the value's."""
    for i in range(at - 1, max(at - 1 - _INDENT, first - 1), -1):
        if text[i] not in " \t":
            return text[i] == "\n"
    return at - first <= _INDENT


def _framed(value: str) -> str:
    """A value without the line feed after its opening tag and the one before its closing tag."""
    for feed in ("\r\n", "\n"):
        if value.startswith(feed):
            value = value[len(feed) :]
            break
    return value[:-2] if value.endswith("\r\n") else value[:-1] if value.endswith("\n") else value
