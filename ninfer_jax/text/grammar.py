"""Grammars that an answer must follow (JSON, JSON schema, regex, Lark, calls of given tools), as masks over token ids.

`json_schema` and its like make a `Grammar`, plain data for `SamplingParams.grammar`; `Grammars` compiles it into a `Matcher`, the
place that one answer has reached in it. The work is llguidance's; here its matchers get this package's tokenizer, its errors become
one line each, and its limits hold for every request: a grammar too large is refused, and one that grows too large on the way ends
its own answer and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import llguidance
import numpy as np

from ninfer_jax.decoding import Grammar
from ninfer_jax.files import printable, shown
from ninfer_jax.text.messages import plain
from ninfer_jax.text.tokenizer import Tokenizer
from ninfer_jax.text.tools.choice import ToolPlan
from ninfer_jax.text.tools.grammar import JSON_STYLE, GrammarError, call_grammar
from ninfer_jax.text.tools.values import dumped

__all__ = [
    "Grammar",
    "GrammarError",
    "Grammars",
    "Matcher",
    "calls",
    "json_object",
    "json_schema",
    "lark",
    "regex",
    "response_format",
]

MAX_BYTES = 1 << 20  # of a grammar's text
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # what they would show is the request's own text
}
_REASON = 300  # characters of a library's message that are passed on


def json_object(field: str = "response_format") -> Grammar:
    """Any JSON object."""
    return Grammar("json_schema", '{"type":"object"}', field)


def json_schema(schema: object, field: str = "response_format.json_schema.schema") -> Grammar:
    """JSON that a schema admits. GrammarError for one that is no JSON object, is too large or admits nothing."""
    if not isinstance(schema, Mapping | bool):
        raise GrammarError(f"{field}: must be an object")
    try:
        schema = plain(schema, field)
    except ValueError as error:
        raise GrammarError(str(error)) from None
    if schema is False:
        raise GrammarError(f"{field}: false admits nothing")
    return Grammar("json_schema", _small(dumped({} if schema is True else schema), field), field)


def regex(pattern: str, field: str = "regex") -> Grammar:
    """Text that a regular expression matches from end to end (Rust's syntax, no look-around)."""
    return Grammar("regex", _small(pattern, field), field)


def lark(grammar: str, field: str = "grammar") -> Grammar:
    """Text that a Lark grammar (llguidance's dialect) derives from `start`."""
    return Grammar("lark", _small(grammar, field), field)


def calls(plan: ToolPlan, field: str = "tools") -> Grammar:
    """Calls of a plan's tools, at most `max_calls`, whose values their schemas admit. Where the plan requires one nothing else
    comes; otherwise any text may come before the first, or instead of them. GrammarError for a plan without tools.

    For the text behind the reasoning, `plan.prefix` included. Parameters come in the order of the schema, required ones always.
    """
    if not plan.callable:
        raise GrammarError(f"{field}: there are none that may be called")
    return Grammar("lark", _small(call_grammar(plan), field), field)


def response_format(value: object, field: str = "response_format") -> Grammar | None:
    """The grammar of a `response_format` as OpenAI's chat API has it: `{"type": "text"}` is none, `{"type": "json_object"}`,
    `{"type": "json_schema", "json_schema": {"schema": …}}`; beside these `{"type": "regex", "pattern": …}` and
    `{"type": "lark", "grammar": …}`. GrammarError for anything else."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str):
        raise GrammarError(f"{field}: must be an object with a type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object(field)
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise GrammarError(f"{field}.json_schema: must be an object with a schema")
        return json_schema(inner["schema"], f"{field}.json_schema.schema")
    if kind == "regex":
        return regex(value.get("pattern"), f"{field}.pattern")  # type: ignore[arg-type]
    if kind == "lark":
        return lark(value.get("grammar"), f"{field}.grammar")  # type: ignore[arg-type]
    raise GrammarError(f"{field}.type: {shown(kind)} is unknown, allowed are text, json_object, json_schema, regex, lark")


class Grammars:
    """Makes matchers for one tokenizer. One serves all requests; making it takes about a second with 248,077 ids.

    words: uint32 words of a mask row, ceil(rows / 32).
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, end_ids: Sequence[int]):
        """rows: of the output head; ids past the tokenizer's have no text and are never allowed. end_ids: tokens that end a turn,
        allowed exactly where the grammar is satisfied."""
        self.rows, self.words = rows, -(-rows // 32)
        self._end_ids = frozenset(end_ids)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._tokenizer = llguidance.LLTokenizer(_wrapped(tokenizer, end_ids), n_vocab=rows, eos_token=list(end_ids))

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new answer's place in a grammar. GrammarError for one that is wrong, too large, or says what no grammar can."""
        try:
            text = _inner(grammar)
        except ValueError as error:
            raise GrammarError(f"{grammar.field}: {_one_line(str(error))}") from None
        inner = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if inner.is_error():
            raise GrammarError(f"{grammar.field}: {_one_line(inner.get_error())}")
        return Matcher(inner, self.words, self._tokenizer.vocab_size, self._end_ids)


class Matcher:
    """The place that one answer has reached in its grammar.

    ended: nothing but an end token can follow, or a limit was hit (`error` says which). words: of a mask row.
    """

    def __init__(self, inner: Any, words: int, ids: int, end_ids: frozenset[int]):
        self._inner, self.words, self._end_ids = inner, words, end_ids
        self._own = -(-ids // 32)  # words of a row that the library fills
        self._past = 0  # end tokens taken behind the last thing that the grammar could say

    @property
    def satisfied(self) -> bool:
        """Whether the answer may end here."""
        return self._inner.is_accepting()

    @property
    def ended(self) -> bool:
        return self._inner.is_stopped()

    @property
    def error(self) -> str:
        """Why no more can be said about the answer; "" if nothing is wrong."""
        return _one_line(self._inner.get_error()) if self._inner.is_error() else ""

    def accept(self, tokens: Sequence[int]) -> int:
        """Takes tokens that were emitted, up to the first that the grammar forbids; how many were taken."""
        taken = self._inner.try_consume_tokens(list(tokens))
        if self._ends_at(tokens, taken):
            self._past, taken = 1, taken + 1
        return taken

    def _ends_at(self, tokens: Sequence[int], at: int) -> bool:
        stopped = self._inner.is_stopped() and not self._inner.is_error()
        return stopped and not self._past and at < len(tokens) and tokens[at] in self._end_ids

    def rollback(self, tokens: int) -> None:
        """Takes back the last tokens taken. ValueError if there are not so many."""
        past, self._past = self._past, 0
        tokens -= past if tokens else 0
        if tokens and not self._inner.rollback(tokens):
            raise ValueError(f"grammar: {tokens} tokens cannot be taken back")

    def legal(self, tokens: Sequence[int]) -> int:
        """The number of some tokens that the grammar would take from here; its state is kept."""
        taken = self.accept(tokens)
        self.rollback(taken)
        return taken

    def forced(self, most: int) -> list[int]:
        """The tokens, at most so many, that must come next whatever is drawn: drafts that are right for certain."""
        return [] if self.ended or most < 1 else self._inner.compute_ff_tokens()[:most]

    def guided(self, drafts: Sequence[int]) -> list[int]:
        """The drafts, with tokens that must come in the places of what was guessed; behind one that is forbidden, or is none (-1),
        as they are."""
        found, taken = list(drafts), 0
        try:
            while taken < len(found) and not self.ended:
                forced = self.forced(len(found) - taken)
                found[taken : taken + len(forced)] = forced
                step = forced or found[taken : taken + 1]
                if step[0] < 0:  # no draft
                    break
                count = self._inner.try_consume_tokens(step)
                taken += count
                if count < len(step):
                    break
        finally:
            if taken and not self._inner.is_error():
                self._inner.rollback(taken)
        return found

    def mask(self, drafts: Sequence[int], into: np.ndarray) -> int:
        """Fills uint32[1 + len(drafts), words]: row i has a bit for every token allowed behind i drafts. How many rows are so
        filled; the state is kept.

        Rows behind a draft that the grammar forbids, or that is none (-1), are all ones: it is never accepted, so nothing is drawn
        from them. Where nothing at all can follow (a limit was hit) a row is all ones as well, never all zeros, and `error` is set.
        """
        if into.dtype != np.uint32 or into.shape != (1 + len(drafts), self.words) or not into.flags.c_contiguous:
            raise ValueError(f"mask: must be uint32[{1 + len(drafts)}, {self.words}], contiguous")
        into[:] = 0xFFFFFFFF
        taken = filled = 0
        try:
            for row in range(1 + len(drafts)):
                into[row, self._own :] = 0
                self._inner.unsafe_compute_mask_ptr(into[row].ctypes.data, self._own * 4)
                if self._inner.is_error() or not into[row].any():
                    into[row] = 0xFFFFFFFF
                    break
                filled += 1
                if row == len(drafts) or self._inner.is_stopped() or drafts[row] < 0 or not _bit(into[row], drafts[row]):
                    break
                if self._inner.try_consume_tokens([drafts[row]]) != 1:
                    break
                taken += 1
        finally:
            if taken and not self._inner.is_error():
                self._inner.rollback(taken)
        return filled


def _inner(grammar: Grammar) -> str:
    """The grammar as llguidance takes it."""
    if grammar.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(grammar.source, defaults=cast(Any, JSON_STYLE))
    make = {"regex": llguidance.LLMatcher.grammar_from_regex, "lark": llguidance.LLMatcher.grammar_from_lark}[grammar.kind]
    return make(grammar.source)


def _small(text: object, field: str) -> str:
    if not isinstance(text, str):
        raise GrammarError(f"{field}: must be a string")
    if len(text) > MAX_BYTES:
        raise GrammarError(f"{field}: has {len(text)} characters, at most {MAX_BYTES} are read")
    return text


def _one_line(message: str) -> str:
    line = printable(" ".join(message.replace("<non-verbose/>", "").split()))
    return line if len(line) <= _REASON else line[:_REASON] + "…"


def _bit(row: np.ndarray, token: int) -> bool:
    return 0 <= token < row.size * 32 and bool(row[token >> 5] >> np.uint32(token & 31) & 1)


def _wrapped(tokenizer: Tokenizer, end_ids: Sequence[int]) -> Any:
    return llguidance.TokenizerWrapper(_Vocabulary(tokenizer, end_ids))


class _Vocabulary:
    """A tokenizer as llguidance asks for it. Special tokens spell no text; the tags of thinking and calls do, as the model writes
    them."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]):
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *end_ids})

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, allow_special=True)
