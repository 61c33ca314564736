"""Separates the model's reasoning from its answer while the text streams in."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from ninfer_jax.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
    """Text to append to each channel."""

    reasoning: str
    answer: str


class _State(Enum):
    START = auto()  # nothing but white space and perhaps part of `<think>` so far
    LEAD = auto()  # reasoning whose leading line feeds are framing
    BODY = auto()
    GAP = auto()  # after `</think>`: line feeds are framing, and so is that tag once more
    ANSWER = auto()


class ReasoningSplitter:
    """Splits streamed text at the first `</think>`, wherever the deltas are cut.

    The framing of the Qwen template, `<think>\\n…\\n</think>\\n\\n`, belongs to neither channel: the tags and the line
    feeds after `<think>`, before and after `</think>` are dropped, as the template does when it reads an answer back.
    Right behind the first `</think>` the same tag again is dropped too; what follows is answer, tags included. Reasoning that is
    never closed stays reasoning.

    start_in_reasoning: the prompt ends inside an open `<think>` (see `starts_in_reasoning`); a repeated `<think>` at
    the start is then dropped. Otherwise the text is answer, unless it begins with `<think>` after white space at most.
    """

    def __init__(self, start_in_reasoning: bool):
        self._after_start = _State.LEAD if start_in_reasoning else _State.ANSWER
        self._state = _State.START
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text that arrives next is reasoning, as far as is known."""
        state = self._after_start if self._state is _State.START else self._state
        return state in (_State.LEAD, _State.BODY)

    def push(self, text: str) -> Piece:
        """The text whose channel is certain now."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state is _State.START:
            text = self._start(text)
        if self._state is _State.LEAD and (text := text.lstrip("\n")):
            self._state = _State.BODY
        if self._state is _State.BODY:
            reasoning, text = self._body(text)
        if self._state is _State.GAP:
            text = self._gap(text)
        return Piece(reasoning, text)

    def flush(self) -> Piece:
        """Ends the stream: what was held as a possible tag or framing is ordinary text after all."""
        held, self._held = self._held, ""
        if not self.in_reasoning:
            return Piece("", held)
        return Piece(held.lstrip("\n") if self._state is _State.START else held, "")

    def _start(self, text: str) -> str:
        """Text after an opening tag, if there is one; holds everything while there could still be one."""
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state = _State.LEAD
            return stripped[len(OPEN) :]
        if OPEN.startswith(stripped):
            self._held = text
            return ""
        self._state = self._after_start
        return text

    def _gap(self, text: str) -> str:
        """Text behind the framing; holds what may become one more `</think>`."""
        text = text.lstrip("\n")
        while text.startswith(CLOSE):
            text = text[len(CLOSE) :].lstrip("\n")
        if CLOSE.startswith(text):
            self._held = text
            return ""
        self._state = _State.ANSWER
        return text

    def _body(self, text: str) -> tuple[str, str]:
        """(reasoning, rest after `</think>`); holds line feeds and a possible `</think>` at the end."""
        before, tag, after = text.partition(CLOSE)
        if tag:
            self._state = _State.GAP
            return before.rstrip("\n"), after
        tail = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        kept = len(text[: len(text) - tail].rstrip("\n"))
        self._held = text[kept:]
        return text[:kept], ""


def starts_in_reasoning(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt leaves a `<think>` open for the model to continue.

    Decided on ids, so tags typed by a user (plain text) do not count; only the last turn does.
    """
    opened, closed = tokenizer.control_tokens.get(OPEN), tokenizer.control_tokens.get(CLOSE)
    turn = tokenizer.control_tokens.get("<|im_start|>")
    for token in reversed(prompt_ids):
        if token in (opened, closed, turn):
            return token == opened
    return False
