"""One answer's way through its grammar: reasoning, which is free, the framing behind it, then what the grammar admits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer_jax.text.grammar import GrammarError, Matcher
from ninfer_jax.text.reasoning import CLOSE
from ninfer_jax.text.tokenizer import Tokenizer

FRAMING = "\n\n"  # what the templates of this family have between `</think>` and the answer
_ALL = np.uint32(0xFFFFFFFF)


class Guide:
    """Masks and drafts for the draws of one answer.

    in_reasoning: the prompt leaves a `<think>` open. The grammar then begins behind the token `</think>` and `FRAMING`, which is
    forced; until then everything may be drawn. GrammarError where the tokenizer has no such token.
    """

    def __init__(self, matcher: Matcher, tokenizer: Tokenizer, in_reasoning: bool):
        close = tokenizer.control_tokens.get(CLOSE)
        if in_reasoning and close is None:
            raise GrammarError(f"grammar: the prompt leaves <think> open, and the tokenizer has no token {CLOSE}")
        self._matcher, self._close = matcher, close
        self._open = in_reasoning
        self._framing = tokenizer.encode(FRAMING) if in_reasoning else []  # what is still to come of it
        self._error = ""

    @property
    def error(self) -> str:
        """Why the answer cannot go on under its grammar; "" if nothing is wrong."""
        return self._error or self._matcher.error

    def accept(self, tokens: Sequence[int], in_reasoning: bool = False) -> None:
        """Takes tokens that were emitted; in_reasoning: whether their text, read as text, is still reasoning."""
        tokens = list(tokens)
        while tokens and self._open:
            self._open = tokens.pop(0) != self._close
        if self._open and not in_reasoning:
            self._error = f"the reasoning was closed by text that spells {CLOSE}"
        while tokens and self._framing:
            if tokens.pop(0) != self._framing.pop(0):
                self._error = "what the grammar forbids was drawn"
        if tokens and not self.error and self._matcher.accept(tokens) < len(tokens):
            self._error = self._matcher.error or "what the grammar forbids was drawn"

    def plan(self, drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """Masks uint32 `[1 + len(drafts), words]` of the next draw's rows, and the int32 drafts that they are made for: those
        given, with tokens that must come in their places. None where every row is free."""
        drafts, row = list(drafts), 0
        if self._open:
            if self._close not in drafts:
                return None
            row = drafts.index(self._close) + 1
        words = np.full((1 + len(drafts), self._matcher.words), _ALL)
        for token in self._framing[: len(words) - row]:
            words[row] = 0
            words[row, token >> 5] = np.uint32(1 << (token & 31))
            drafts[row : row + 1] = [token]  # one more than the rows hold behind the last of them
            row += 1
        if row < len(words):
            drafts[row:] = self._matcher.guided(drafts[row : len(words) - 1])
            self._matcher.mask(drafts[row:], words[row:])
        return words, np.array(drafts[: len(words) - 1], np.int32)
