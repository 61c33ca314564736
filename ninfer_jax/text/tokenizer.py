"""Byte-level BPE tokenizer of a checkpoint, with control tokens under the caller's control.

The stock tokenizer turns text that spells an added token (`<|im_end|>`, `<think>`, `<tool_call>` …) into that token,
wherever the text comes from. Here this is a choice of the caller, and the default is plain text: what a user types
can never become a turn border. With `allow_special=True` the ids equal those of the stock tokenizer.
"""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import tokenizers

TURN_END, TEXT_END = "<|im_end|>", "<|endoftext|>"
_UNSUPPORTED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class Tokenizer:
    """Text <-> token ids.

    vocab_size: number of addressable ids, 0 .. vocab_size-1. The embedding may have more rows (248,320 for 248,077
        ids); those rows have no text and must not be sampled.
    control_tokens: added token -> id, every token that text can be forbidden to spell.
    special_ids: the ids among them that `decode` drops by default (turn and media markers). Thinking and tool-call
        tags are control tokens too but carry meaning in the output, so they are kept.
    """

    def __init__(self, specification: dict, source: str = "tokenizer.json"):
        """specification: the parsed `tokenizer.json`; source: its name for messages. ValueError if unsupported."""
        added = _check(specification, source)
        vocab = specification["model"]["vocab"]
        self.control_tokens = {token["content"]: token["id"] for token in added}
        self.special_ids = frozenset(token["id"] for token in added if token.get("special"))
        self.vocab_size = max(chain(vocab.values(), self.control_tokens.values()), default=-1) + 1
        self._vocab = vocab
        self._bytes = _token_bytes(vocab, self.control_tokens, self.vocab_size, source)
        # The library matches added tokens ahead of everything else and has no switch for the non-special ones, so
        # plain text goes through a tokenizer that has none, and control tokens are found here. A regex that tries
        # longer tokens first finds the leftmost-longest match, as the library does.
        self._plain = _build(specification | {"added_tokens": []}, source)
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint directory. ValueError if `tokenizer.json` is missing, damaged or foreign."""
        file = Path(path) / "tokenizer.json"
        try:
            specification = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{file}: cannot be read ({error.strerror}); a checkpoint needs this file") from None
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from None
        return cls(specification, str(file))

    def encode(self, text: str, allow_special: bool = False, plain_spans: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Token ids of `text`; nothing (no BOS) is added.

        allow_special: spelled control tokens become their ids. plain_spans: with allow_special, sorted character
        ranges [start, end) in which spelled control tokens stay text all the same.
        ValueError if the text has a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}):"
                " only valid Unicode can be encoded"
            ) from None
        if not allow_special:
            return self._encode_plain(text)
        ids: list[int] = []
        done = span = 0
        for match in self.control_pattern.finditer(text):
            while span < len(plain_spans) and plain_spans[span][1] <= match.start():
                span += 1
            if span < len(plain_spans) and plain_spans[span][0] < match.end():
                continue
            # Everything between two control tokens is one piece: merging and splitting see the same neighbours as in
            # the stock tokenizer, whether or not part of the piece spells a control token.
            ids += self._encode_plain(text[done : match.start()])
            ids.append(self.control_tokens[match[0]])
            done = match.end()
        return ids + self._encode_plain(text[done:])

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. skip_special drops the tokens in `special_ids`."""
        return self.decode_bytes(ids, skip_special).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        """Like `decode`, before the bytes are read as UTF-8."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join([self.token_bytes(token) for token in ids if token not in skipped])

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for: possibly part of a character. ValueError if the id is out of range."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is out of range: this tokenizer has ids 0..{self.vocab_size - 1}")
        return self._bytes[token]

    def token_id(self, token: str) -> int:
        """Id of an added token by its text, or of a vocabulary entry by its byte-level spelling (`Ġthe`)."""
        found = self.control_tokens.get(token, self._vocab.get(token))
        if found is None:
            raise ValueError(f"token {token!r} is not in the tokenizer's vocabulary")
        return found

    def eos_ids(self) -> tuple[int, ...]:
        """Ids of the end-of-turn and end-of-text tokens this tokenizer has, for checkpoints that name no EOS."""
        return tuple(self.control_tokens[token] for token in (TURN_END, TEXT_END) if token in self.control_tokens)

    def _encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids if text else []


def _check(specification: object, source: str) -> list[dict]:
    """The added tokens of a `tokenizer.json` this engine can reproduce exactly; ValueError for any other."""
    if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
        raise ValueError(f"{source}: not a tokenizer.json, it has no `model`")
    model, decoder = specification["model"], specification.get("decoder")
    if model.get("type") != "BPE" or not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise ValueError(f"{source}: only byte-level BPE is supported, this is model {model.get('type')!r}")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(type(token) is int and token >= 0 for token in vocab.values()):
        raise ValueError(f"{source}: model.vocab must map tokens to ids")
    added = specification.get("added_tokens") or []
    for index, token in enumerate(added):
        if not isinstance(token, dict) or type(token.get("id")) is not int or not token.get("content"):
            raise ValueError(f"{source}: added_tokens[{index}] needs an id and a content")
        for flag in _UNSUPPORTED_FLAGS:
            if token.get(flag):
                raise ValueError(f"{source}: added token {token['content']!r} has {flag}=true, which is not supported")
    return added


def _build(specification: dict, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(specification))
    except Exception as error:
        if type(error) is not Exception:  # the library reports bad files with the base class and nothing finer
            raise
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None


def _token_bytes(vocab: dict[str, int], added: dict[str, int], size: int, source: str) -> list[bytes]:
    """Bytes of every id. ValueError if an id below the largest one has no token, as it could be sampled."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    # The GPT-2 table: printable bytes stand for themselves, the others for U+0100, U+0101, …
    byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    table: list[bytes | None] = [None] * size
    for token, index in vocab.items():
        try:
            table[index] = bytes(map(byte_of.__getitem__, token))
        except KeyError:
            table[index] = token.encode()
    for token, index in added.items():
        table[index] = token.encode()
    if None in table:
        raise ValueError(f"{source}: id {table.index(None)} has no token, but there are larger ids")
    return table
