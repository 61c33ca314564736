"""Streaming detokenisation: ids in, text out, never a broken character."""

import codecs
from collections.abc import Iterable, Sequence

from ninfer_jax.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Turns token ids into text as they arrive.

    For every grouping of the ids, the concatenated `push` results plus `flush` equal `tokenizer.decode(all ids)`.
    Bytes of an unfinished character (at most 3) are held back; U+FFFD appears only once bytes are proven invalid, or
    at `flush`. The work per token is proportional to its bytes, whatever came before.

    after: ids before the first pushed one, a prompt for instance. Where they end inside a character whose other bytes come
    first, the text begins with that whole character; where something else comes, it begins with that, and the prompt's
    bytes leave nothing in it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before = _open_character(tokenizer, after)
        self._first = b""  # pushed bytes that may go on with it

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; empty while a character is unfinished. ValueError for an id out of range."""
        return self._decode(self._tokenizer.decode_bytes(ids, self._skip_special))

    def flush(self) -> str:
        """Ends the stream: a held unfinished character comes out as U+FFFD. The decoder can then be used again."""
        cut = self._before + self._first if self._first else b""
        self._before = self._first = b""
        text = self._utf8.decode(cut, final=True)
        self._utf8.reset()
        return text

    def _decode(self, new: bytes) -> str:
        if self._before:
            self._first += new
            character = (self._before + self._first)[: _length(self._before[0])]
            try:
                whole = codecs.getincrementaldecoder("utf-8")().decode(character)
            except UnicodeDecodeError:  # something else came
                new = self._first
            else:
                if not whole:
                    return ""
                new = self._before + self._first
            self._before = self._first = b""
        return self._utf8.decode(new)


def _length(lead: int) -> int:
    """Bytes of a UTF-8 character by its first one, which says so."""
    return 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2


def _open_character(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes of the character that `ids` leave unfinished; empty where they end between two."""
    end, at = b"", len(ids)
    while at and len(end) < 3:  # an unfinished character has no more
        at -= 1
        end = tokenizer.token_bytes(ids[at]) + end
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(end[-3:])
    return decoder.getstate()[0]
