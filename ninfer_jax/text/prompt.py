"""From messages to prompt ids, so that text spelling control tokens stays text.

Rendering first and tokenising afterwards would lose who wrote what: `<|im_end|>` typed by a user would end the turn.
So when message text spells control tokens the template is rendered a second time, with an invisible mark next to each
such spelling; the marks tell which spellings in the prompt are text. Marks sit beside the spelling, never inside it,
so tests like `content.startswith('<tool_response>')` have the same outcome as in the unmarked rendering, and the two
renderings must be equal apart from the marks.

What counts as text:
- everything in system, user and tool messages, in tool definitions and in template options;
- in assistant messages the special tokens only (turn and media markers). Thinking and tool-call tags there follow the
  template, because replayed answers legitimately contain them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ninfer_jax.text.control_tokens import ControlTokens
from ninfer_jax.text.messages import normalize_messages, normalize_tools, plain
from ninfer_jax.text.template import ChatTemplate
from ninfer_jax.text.tokenizer import Tokenizer

_SWITCHES = ("enable_thinking", "preserve_thinking", "add_vision_id")
# Marks are taken from the private-use planes 15 and 16, skipping characters that the input uses.
_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class Prompt:
    """text: what the template rendered. ids: its tokens; equal to `tokenizer.encode(text, allow_special=True)`
    whenever no message text spells a control token."""

    text: str
    ids: list[int]


def render_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = True,
    **options: object,
) -> Prompt:
    """Checks the messages (see `normalize_messages`), renders them and tokenises the result.

    options: the template's switches; None means not given. ValueError for bad messages, for an option the template
    does not read, and for whatever the template itself refuses (with its text).
    """
    messages, tools = normalize_messages(messages), normalize_tools(tools)
    options = _check_options(template, options)
    now = datetime.now()  # one clock for both renderings

    text = _render(template, messages, tools, add_generation_prompt, now, options)
    marker = _Marker(tokenizer, (messages, tools, options))
    marked = [marker.message(message) for message in messages]
    marked_tools: Any = marker.anything(tools)
    marked_options: Any = marker.anything(options)
    if not marker.used:
        return Prompt(text, tokenizer.encode(text, allow_special=True))
    unmarked, spans = marker.remove(_render(template, marked, marked_tools, add_generation_prompt, now, marked_options))
    if unmarked != text:
        raise ValueError(
            "messages: the text spells control tokens and this chat template changes it in a way that hides who wrote"
            " them; remove the control tokens from the text"
        )
    return Prompt(text, tokenizer.encode(text, allow_special=True, plain_spans=spans))


def render_to_ids(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = True,
    **options: object,
) -> list[int]:
    """The ids of `render_prompt`."""
    return render_prompt(template, tokenizer, messages, tools, add_generation_prompt, **options).ids


def _check_options(template: ChatTemplate, options: dict) -> dict:
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in template.options:
            known = ", ".join(sorted(template.options)) or "none"
            raise ValueError(f"{name}: this chat template has no such option, it reads {known}")
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{name}: must be true or false, not {value!r}")
    return {name: plain(value, name) for name, value in given.items()}


def _render(
    template: ChatTemplate,
    messages: list[dict],
    tools: list[dict] | None,
    add_generation_prompt: bool,
    now: datetime,
    options: dict,
) -> str:
    """Renders; a conversation that only has tool rounds gets by without a user message.

    Agents send such histories after compressing them, but the Qwen templates refuse them ("No user query found").
    A user turn is then inserted for rendering and cut out again; every message given stays in the prompt.
    """
    try:
        return template.render(messages, tools, add_generation_prompt, now, **options)
    except ValueError:
        if any(m["role"] == "user" for m in messages) or not any(m.get("tool_calls") for m in messages):
            raise
        leading = 1 if messages[0]["role"] == "system" else 0
        turn = "<|im_start|>user\n{}<|im_end|>\n"
        query = next(_free_characters((messages, tools)))
        padded = [*messages[:leading], {"role": "user", "content": query}, *messages[leading:]]
        text = template.render(padded, tools, add_generation_prompt, now, **options)
        if text.count(turn.format(query)) != 1 or text.count(query) != 1:
            raise
        return text.replace(turn.format(query), "")


class _Marker:
    """Puts marks beside spelled control tokens and finds them again in the rendered prompt.

    Each spelling has two marks of its own, one that goes before it and one that goes after it: the latter is used at the
    start of a text, so that neither trimming nor `startswith` sees a mark. A mark whose spelling is not beside it any more
    (a template may split text at a tag) is meaningless and dropped.
    """

    def __init__(self, tokenizer: Tokenizer, values: object):
        self._all, self._special = tokenizer.control, tokenizer.special
        self._free = _free_characters(values)
        self._marks: dict[str, tuple[str, str]] = {}

    @property
    def used(self) -> bool:
        return bool(self._marks)

    def message(self, message: dict) -> dict:
        """The message with marks in all its text but the role."""
        tokens = self._special if message["role"] == "assistant" else self._all
        return {key: value if key == "role" else self._mark(value, tokens) for key, value in message.items()}

    def anything(self, value: object) -> object:
        """A JSON value with marks beside every spelled control token, keys included."""
        return self._mark(value, self._all)

    def remove(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """(text without marks, sorted character ranges in it of the marked spellings)."""
        meaning = {mark: (spelling, mark == marks[0]) for spelling, marks in self._marks.items() for mark in marks}
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        length = done = 0
        for match in re.finditer(f"[{''.join(meaning)}]", text):
            pieces.append(text[done : match.start()])
            length += match.start() - done
            done = match.end()
            spelling, before = meaning[match[0]]
            if before and text.startswith(spelling, done):
                spans.append((length, length + len(spelling)))
            elif not before and text.endswith(spelling, 0, match.start()):
                spans.append((length - len(spelling), length))
        return "".join([*pieces, text[done:]]), spans

    def _mark(self, value: object, tokens: ControlTokens) -> object:
        if isinstance(value, str):
            return self._mark_text(value, tokens)
        if isinstance(value, dict):
            return {self._mark(key, tokens): self._mark(item, tokens) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item, tokens) for item in value]
        return value

    def _mark_text(self, text: str, tokens: ControlTokens) -> str:
        first = len(text) - len(text.lstrip())
        pieces, done = [], 0
        for start, end in tokens.spellings(text):
            spelling = text[start:end]
            if spelling not in self._marks:
                self._marks[spelling] = next(self._free), next(self._free)
            before, after = self._marks[spelling]
            pieces += [text[done:start], spelling + after if start == first else before + spelling]
            done = end
        return "".join([*pieces, text[done:]])


def _free_characters(values: object) -> Iterator[str]:
    """Private-use characters that occur nowhere in `values`, one after another; ValueError when there are no more."""
    used = set(_strings(values))
    yield from (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    raise ValueError("messages: the text uses nearly every private-use character, none is left to mark tokens with")


def _strings(value: object) -> Iterator[str]:
    """The characters of all strings in JSON values, each at least once."""
    if isinstance(value, str):
        yield from set(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
