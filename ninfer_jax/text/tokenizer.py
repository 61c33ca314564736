"""Byte-level BPE tokenizer of a checkpoint, with control tokens under the caller's control.

The stock tokenizer turns text that spells an added token (`<|im_end|>`, `<think>`, `<tool_call>` …) into that token,
wherever the text comes from. Here this is a choice of the caller, and the default is plain text: what a user types
can never become a turn border. With `allow_special=True` the ids equal those of the stock tokenizer.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from ninfer_jax.files import kind_of, lone_surrogate, read_json, read_object
from ninfer_jax.text.control_tokens import ControlTokens, Spans
from ninfer_jax.text.tokenizer_file import read_specification

TURN_END, TEXT_END = "<|im_end|>", "<|endoftext|>"
FAMILY_CLASSES = ("Qwen3_5Tokenizer", "Qwen3_5TokenizerFast")


class Tokenizer:
    """Text <-> token ids.

    vocab_size: number of addressable ids, 0 .. vocab_size-1. The embedding may have more rows (248,320 for 248,077
        ids); those rows have no text and must not be sampled.
    control_tokens: added token -> id, every token that text can be forbidden to spell.
    special_ids: the ids among them that `decode` drops by default (turn and media markers). Thinking and tool-call
        tags are control tokens too but carry meaning in the output, so they are kept.
    control, special: where text spells control tokens, or only those that are special.
    notes: one line for every setting of the files that a reader would expect to count and that does not.
    has_text: whether ids have text at all; False of `NoTokenizer` alone.
    """

    has_text = True

    def __init__(
        self,
        specification: dict,
        source: str = "tokenizer.json",
        config: Mapping[str, Any] | None = None,
        model_type: str | None = None,
    ):
        """specification: the parsed `tokenizer.json`; source: its name for messages; config: the parsed
        `tokenizer_config.json`; model_type: of `config.json`. ValueError if unsupported."""
        config = config or {}
        read = read_specification(specification, config, _is_family(config, model_type), source)
        self.notes = read.notes
        self.control_tokens = {token.content: token.id for token in read.added}
        self.special_ids = frozenset(token.id for token in read.added if token.special)
        self.vocab_size = max(chain(read.vocab.values(), self.control_tokens.values()), default=-1) + 1
        self._vocab = read.vocab
        self._bytes = _token_bytes(read.vocab, self.control_tokens, self.vocab_size, source)
        # The library matches added tokens ahead of everything else and has no switch for the non-special ones, so
        # plain text goes through a tokenizer that has none, and control tokens are found here.
        self._plain = _build(read.model, source)
        normalise = tokenizers.normalizers.NFC().normalize_str if read.normalises else str
        self.control = ControlTokens(read.added, normalise)
        self.special = ControlTokens([token for token in read.added if token.special], normalise)

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint directory: its `tokenizer.json`, with what `tokenizer_config.json` says of added
        tokens. ValueError if a file is missing, damaged or foreign."""
        file = Path(path) / "tokenizer.json"
        if kind_of(file) is None:
            raise ValueError(f"{file}: cannot be read (No such file or directory); a checkpoint needs this file")
        config, model = (read_object(Path(path) / name) for name in ("tokenizer_config.json", "config.json"))
        return cls(read_json(file), str(file), config, model.get("model_type"))

    def encode(self, text: str, allow_special: bool = False, plain_spans: Spans = ()) -> list[int]:
        """Token ids of `text`; nothing (no BOS) is added.

        allow_special: spelled control tokens become their ids. plain_spans: with allow_special, sorted character
        ranges [start, end) in which spelled control tokens stay text all the same.
        ValueError if the text has a lone surrogate.
        """
        if found := lone_surrogate(text):
            raise ValueError(f"text: {found}")
        if not allow_special:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self.control.split(text, plain_spans):
            ids += [piece] if isinstance(piece, int) else self._encode_plain(piece)
        return ids

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


def _is_family(config: Mapping[str, Any], model_type: object) -> bool:
    """Whether `transformers` (5.24, AutoTokenizer) takes its Qwen3_5Tokenizer for such a checkpoint."""
    named = config.get("tokenizer_class")
    return model_type == "qwen3_5" or named in FAMILY_CLASSES or (model_type == "qwen3_5_text" and named is None)


def _build(specification: dict, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(specification))
    except BaseException as error:
        # The library reports bad files with the base class and nothing finer, or panics.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None


def _token_bytes(vocab: dict[str, int], added: dict[str, int], size: int, source: str) -> list[bytes]:
    """Bytes of every id. ValueError if an id below the largest one has no token, as it could be sampled."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    # The GPT-2 table: printable bytes stand for themselves, the others for U+0100, U+0101, …
    byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    table: dict[int, bytes] = {}
    for token, index in vocab.items():
        try:
            table[index] = bytes(map(byte_of.__getitem__, token))
        except KeyError:
            table[index] = _utf8(token, source)
    for token, index in added.items():
        table[index] = _utf8(token, source)
    if (lacking := next((id_ for id_ in range(size) if id_ not in table), None)) is not None:
        raise ValueError(f"{source}: id {lacking} has no token, but there are larger ids")
    if (lost := next((byte for character, byte in byte_of.items() if character not in vocab), None)) is not None:
        raise ValueError(f"{source}: no token for byte {lost}, so text that has it would be lost")
    return [table[id_] for id_ in range(size)]


def _utf8(token: str, source: str) -> bytes:
    if found := lone_surrogate(token):
        raise ValueError(f"{source}: token {token!r}: {found}")
    return token.encode()
