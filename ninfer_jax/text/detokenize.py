"""Streaming detokenisation: ids in, text out, never a broken character."""

import codecs
from collections.abc import Iterable

from ninfer_jax.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Turns token ids into text as they arrive.

    For every grouping of the ids, the concatenated `push` results plus `flush` equal `tokenizer.decode(all ids)`.
    Bytes of an unfinished character (at most 3) are held back; U+FFFD appears only once bytes are proven invalid, or
    at `flush`. The work per token is proportional to its bytes, whatever came before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; empty while a character is unfinished. ValueError for an id out of range."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids, self._skip_special))

    def flush(self) -> str:
        """Ends the stream: a held unfinished character comes out as U+FFFD. The decoder can then be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
