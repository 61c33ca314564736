"""Places where text spells control tokens, found as the `tokenizers` library finds them.

The library takes added tokens out of the raw text first, except those flagged `normalized`: these it looks for in the
normalised text between the others, by their own normalised spelling. So `<é>` is found however its é was typed, and a
combining mark after `<x>` hides it where the two make one character. In both steps the leftmost match wins, of those
the longest.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class AddedToken:
    """One added token of a tokenizer: special ones are dropped from decoded text, normalised ones found in normalised text."""

    id: int
    content: str
    special: bool
    normalized: bool


class ControlTokens:
    """Finds a set of added tokens in text. normalise: what the tokenizer does to text before it splits it, NFC or nothing."""

    def __init__(self, tokens: Sequence[AddedToken], normalise: Callable[[str], str]):
        self._normalise = normalise
        self._ids = {token.content: token.id for token in tokens if not token.normalized}
        self._exact = _longest_first(self._ids)
        self._normalised_ids: dict[str, int] = {}
        for token in sorted(tokens, key=lambda token: not token.special):  # of equal spellings the library takes a special one
            if token.normalized and (spelling := normalise(token.content)):
                self._normalised_ids.setdefault(spelling, token.id)
        self._normalised = _longest_first(self._normalised_ids) if self._normalised_ids else None

    def split(self, text: str, plain_spans: Spans = ()) -> Iterator[str | int]:
        """Ids of the control tokens in `text` and the pieces between them, in order. plain_spans: sorted, disjoint character
        ranges; what touches one is no control token. Everything between two control tokens is one piece: merging sees the
        same neighbours as in the stock tokenizer, whether or not part of the piece spells a control token."""
        done = 0
        for match in self._exact.finditer(text):
            if not _touches(plain_spans, *match.span()):
                yield from self._split_normalised(text[done : match.start()], done, plain_spans)
                yield self._ids[match[0]]
                done = match.end()
        yield from self._split_normalised(text[done:], done, plain_spans)

    def spellings(self, text: str) -> list[tuple[int, int]]:
        """Sorted, disjoint character ranges of `text` that spell control tokens."""
        found, done = [], 0
        for match in [*self._exact.finditer(text), None]:
            start, end = match.span() if match else (len(text), len(text))
            for a, b, _ in self._in_piece(text[done:start])[1]:
                # Marks that the normaliser reorders can belong to two neighbours: one range then covers both.
                if found and done + a < found[-1][1]:
                    a = found.pop()[0] - done
                found.append((done + a, done + b))
            if match:
                found.append((start, end))
            done = end
        return found

    def _split_normalised(self, piece: str, offset: int, plain_spans: Spans) -> Iterator[str | int]:
        normal, matches = self._in_piece(piece)
        done = 0
        for start, end, match in matches:
            if not _touches(plain_spans, offset + start, offset + end):
                if done < match.start():
                    yield normal[done : match.start()]
                yield self._normalised_ids[match[0]]
                done = match.end()
        if done < len(normal):
            yield normal[done:]

    def _in_piece(self, piece: str) -> tuple[str, list[tuple[int, int, re.Match]]]:
        """(the piece normalised, (start, end in the raw piece, match in the normalised) of each normalised token)."""
        if self._normalised is None or not piece:
            return piece, []
        normal = self._normalise(piece)
        matches = list(self._normalised.finditer(normal))
        if not matches:
            return normal, []
        starts, places = _aligned(piece, normal, self._normalise)
        found = []
        for match in matches:
            first, last = bisect_right(places, match.start()) - 1, bisect_right(places, match.end() - 1)
            found.append((starts[first], starts[last] if last < len(starts) else len(piece), match))
        return normal, found


def _longest_first(spellings: dict[str, int]) -> re.Pattern:
    """A regex that tries longer tokens first finds the leftmost-longest match, as the library does."""
    return re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) or "(?!)")


def _touches(spans: Spans, start: int, end: int) -> bool:
    after = bisect_left(spans, (end,))
    return after > 0 and spans[after - 1][1] > start


def _aligned(raw: str, normal: str, normalise: Callable[[str], str]) -> tuple[Sequence[int], Sequence[int]]:
    """Borders in `raw` that no composition crosses, and the places in `normal` that they have there."""
    if raw == normal:
        return range(len(raw)), range(len(raw))
    starts = [0, *(at for at in range(1, len(raw)) if _begins(raw[at]))]
    ends = [*starts[1:], len(raw)]
    places = list(accumulate((len(normalise(raw[a:b])) for a, b in zip(starts, ends, strict=True)), initial=0))
    # Should a character compose that this Python does not know yet, all is one range: nothing is attributed wrongly.
    return (starts, places[:-1]) if places[-1] == len(normal) else ([0], [0])


def _begins(character: str) -> bool:
    """Whether a character never joins one before it under NFC."""
    if character.isascii():
        return True
    # Marks, the vowels and finals of Hangul, the vowel signs of Kirat Rai, and what this Python's Unicode lacks.
    joins = "\u1160" <= character <= "\u11ff" or "\ud7b0" <= character <= "\ud7ff" or "\U00016d63" <= character <= "\U00016d6a"
    return not joins and unicodedata.combining(character) == 0 and unicodedata.category(character) not in ("Mn", "Mc", "Me", "Cn")
