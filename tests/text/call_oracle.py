"""Tool calls read from a whole text at once, with regular expressions: what the incremental parser is compared with.

Shares no code with it. Values are left as text; `typed` is tested for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

TAGS = ["<tool_call>", "<parameter=", "</parameter>", "</function>", "</tool_call>"]
W = r"[ \t\r\n]*"


def ends(tags: list[str]) -> str:
    """The end of the text, perhaps inside one of the tags."""
    return "(?:" + "|".join(re.escape(tag[:n]) for tag in tags for n in range(len(tag))) + r")\Z"


END = ends(TAGS)
CLOSERS = rf"(?:{W}(?:</parameter>|</function>|</tool_call>))*"
DONE = rf"(?:</function>|</tool_call>){CLOSERS}"
LAST = rf"{W}(?:<tool_call>|{END})"
STRONG = rf"</parameter>(?:{W}</parameter>)*(?:{W}(?:<tool_call>|<parameter=%s)|{W}{DONE}{LAST})"
# Where the text was cut, one tag at its end proves nothing.
TWICE = rf"(?:</function>|</tool_call>)(?:{W}</parameter>)*{W}{DONE}"
CLOSED = re.compile(rf"</parameter>(?:{W}</parameter>)*{W}{DONE}")
NAME = r"[ \t\r]*([^<>\n]*[^<>\n= \t\r]|[^<>\n=])[ \t\r]*"
HEADER = re.compile(rf"{W}<function={NAME}>")
PARAMETER = re.compile(rf"<parameter={NAME}>")
LINE = r"(?:(?<=\n)|(?<=\A))[ \t]*"


class Text(Exception):
    """The call is none, up to a place."""


def read(text: str, tools: Mapping[str, set[str]], fits: Callable[[str, str, str], object], cut: bool) -> list:
    """[content | (name, {parameter: value}, complete, dropped)] of a text. fits(function, parameter, value) raises KeyError."""
    found: list = []

    def say(piece: str) -> None:
        if piece and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece:
            found.append(piece)

    at = done = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        at = start + len("<tool_call>")
        header = HEADER.match(text, at)
        if not header or header[1].strip() not in tools:
            continue
        try:
            call, end = read_call(text, header.end(), header[1].strip(), tools, fits, cut)
        except Text as text_until:
            at = text_until.args[0]
            continue
        say(text[done:start].rstrip(" \t\r\n"))
        found.append(call)
        done = at = re.compile(rf"{CLOSERS}{W}(?:{ends(TAGS[2:])})?").match(text, end).end()
    say(text[done:])
    return found


def read_call(text: str, at: int, name: str, tools: Mapping[str, set[str]], fits: Callable, cut: bool) -> tuple[tuple, int]:
    given: dict[str, object] = {}
    dropped: list[str] = []

    def result(complete: bool, end: int) -> tuple[tuple, int]:
        return (name, given, complete, tuple(dropped)), end

    while True:
        at = re.compile(rf"(?:{W}</parameter>)*{W}").match(text, at).end()
        if closing := re.compile(r"</function>|</tool_call>").match(text, at):
            return result(True, closing.end())
        if text.startswith("<tool_call>", at) and given:
            return result(True, at)
        if re.compile(rf"{END}").match(text, at) or (cut and re.compile(r"<parameter=[^<>\n]*\Z").match(text, at)):
            if not given and not cut:
                raise Text(at)
            return result(not cut, len(text))
        parameter = PARAMETER.match(text, at)
        if not parameter:
            if not given:
                raise Text(at)
            following = re.compile("|".join(TAGS)).search(text, at + 1)
            end = following.start() if following else len(text)
            dropped.append(text[at:end].strip(" \t\r\n"))
            at = end
            continue
        key, first = parameter[1].strip(), parameter.end()
        close = value_end(text, first, key, set(tools[name]) - given.keys(), tools, cut)
        if close is None:
            if not given and not cut:
                raise Text(len(text))
            dropped.append(key)
            return result(False, len(text))
        value = re.fullmatch(r"(?:\r?\n)?(.*?)(?:\r?\n)?", text[first : close[0]], re.DOTALL)[1]
        try:
            if key in given:
                raise KeyError(key)
            given[key] = fits(name, key, value)
        except KeyError:
            if not given:
                raise Text(close[0]) from None
            dropped.append(key)
        at = close[1]


def value_end(text: str, first: int, key: str, free: set[str], tools: Mapping, cut: bool) -> tuple[int, int] | None:
    """(where a value ends, where to go on): at the first tag that is sure to close, else at the last that may."""
    rest = text[first:]
    sure_close = re.compile(STRONG % ("" if cut else f"|{END}"))
    sure_end = rf"{TWICE}{LAST}|{DONE}{W}<tool_call>" if cut else f"{DONE}{LAST}"
    at_line = [
        match.start(1)
        for match in re.finditer(rf"{LINE}(<parameter={NAME}>|{sure_end})", rest)
        if not (match[1].startswith("<parameter=")) or match[2].strip() in free - {key}
    ]
    strong = [(match.start(), match.start() + len("</parameter>")) for match in sure_close.finditer(rest)]
    strong += [(start, start) for start in at_line]
    maybe = [m.start() for m in re.finditer("</parameter>", rest) if not sure_close.match(rest, m.start())]
    implicit = [m.start(1) for m in re.finditer(rf"{LINE}({DONE})", rest)]
    calls = [m.start() for m in re.finditer("<tool_call>", rest) if (h := HEADER.match(rest, m.end())) and h[1].strip() in tools]
    sure = min(strong, default=None)
    fence = next((call for call in calls if any(place < call for place in [*maybe, *implicit])), None)
    if sure is not None and (fence is None or sure[0] < fence):
        return first + sure[0], first + sure[1]
    limit = len(rest) if fence is None else fence
    places = [place for place in maybe if place < limit]
    if cut and fence is None:
        places = [place for place in places if CLOSED.match(rest, place)]
    if places:
        return first + places[-1], first + places[-1] + len("</parameter>")
    implicit = [place for place in implicit if place < limit]
    return (first + implicit[0], first + implicit[0]) if implicit else None
