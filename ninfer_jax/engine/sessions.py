"""A conversation as one file: its tokens, and the checkpoint and pages from which it goes on without prefill."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_jax.cache import TURN
from ninfer_jax.cache.container import BadFile, packed, read_head, read_piece, write
from ninfer_jax.config import PAGE
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.files import FileError, shown, user_path

KIND = "conversation"


def save(prefixes: KeptPrefixes, tokens: SequenceOf[int], conversation: Any, path: str | Path) -> int:
    """Write a conversation, of which `tokens` is all that the model shall have read, and `conversation` the same as JSON; how many
    of them need no prefill tomorrow. What is missing of that is prefilled first. FileError where the file cannot be written."""
    path = user_path(path, "session")
    prefixes.settle_now(tokens)
    with prefixes.cache.find(tokens, counted=False) as hit:
        image = hit.load()
        fields = {
            "tokens": base64.b64encode(np.asarray(tokens, "<i4").tobytes()).decode(),
            "length": hit.length,
            "conversation": conversation,
        }
        pieces = [] if image is None else [image.state, *image.pages]
        with _naming(path):
            write(path, packed(KIND, prefixes.identity(), fields, pieces), pieces)
        return hit.length


def conversation_in(path: str | Path) -> Any:
    """The conversation of a file, whatever engine wrote it. FileError as for `load`."""
    path = user_path(path, "session")
    with _naming(path):
        contents = read_head(path, None)
        if contents.kind != KIND or "conversation" not in contents.fields:
            raise BadFile("is no conversation")
        return contents.fields["conversation"]


def load(prefixes: KeptPrefixes, path: str | Path) -> Any:
    """The conversation of a file, whose beginning the cache knows from now on. FileError, one line, where the file is damaged or
    was written by an engine with another model, format or code."""
    path = user_path(path, "session")
    with _naming(path):
        contents = read_head(path, prefixes.identity())
        try:
            tokens = np.frombuffer(base64.b64decode(contents.fields["tokens"], validate=True), "<i4").tolist()
            length, conversation = int(contents.fields["length"]), contents.fields["conversation"]
            sizes = [size for _, size, _ in contents.pieces]
            pages = -(-length // PAGE)
            wanted = [prefixes.cache.state_bytes, *[prefixes.cache.page_bytes] * pages] if length else []
            if contents.kind != KIND or not 0 <= length <= len(tokens) or sizes != wanted:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise BadFile("is damaged, or no conversation") from None
        if length:
            kept = prefixes.cache.keep(
                tokens[:length],
                TURN,
                lambda: read_piece(path, contents, 0),
                lambda indices: (read_piece(path, contents, 1 + index) for index in indices),
            )
            if not kept and prefixes.known(tokens[:length]) < length:
                raise FileError(
                    f"session {shown(path)} has {sum(sizes):,} bytes of pages and states, cache_bytes is "
                    f"{prefixes.cache.host_bytes:,}: load the engine with more"
                )
    return conversation


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except BadFile as error:
        raise FileError(f"session {shown(path)} {error}") from None
    except OSError as error:
        raise FileError(f"session {shown(path)}: {error.strerror or error}") from None
