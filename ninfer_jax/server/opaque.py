"""Reasoning as a blob that clients keep and send back without reading it."""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "ninfer1."
_MAX = 32 << 20  # bytes that a blob may unpack to


def sealed(text: str) -> str:
    """The blob of a text. It is compressed, not secret: it goes to whoever got the text's answer."""
    return _MARK + base64.urlsafe_b64encode(zlib.compress(text.encode(), 6)).decode()


def opened(blob: object) -> str | None:
    """The text of a blob made here; None for any other."""
    if not isinstance(blob, str) or not blob.startswith(_MARK):
        return None
    try:
        packed = base64.urlsafe_b64decode(blob.removeprefix(_MARK).encode("ascii"))
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _MAX)
        return None if unpacker.unconsumed_tail else data.decode()
    except (ValueError, binascii.Error, zlib.error):
        return None
