"""A cache over pages and states of a few bytes, each made from the tokens that it stands for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from ninfer_jax.cache import PrefixCache

PAGE = 64
PAGE_BYTES, STATE_BYTES = 32, 200
IDENTITY = {"model": "m", "format": "f32", "code": "c"}


def made_of(what: str, tokens, size: int) -> np.ndarray:
    """Bytes that no other tokens would give."""
    text = hashlib.shake_128(f"{what} {list(map(int, tokens))}".encode()).digest(size)
    return np.frombuffer(text, np.uint8).copy()


def state_of(tokens) -> np.ndarray:
    return made_of("state", tokens, STATE_BYTES)


def page_of(tokens, index: int) -> np.ndarray:
    """Of what the page holds and of the token after it, as the MTP layer's entries are."""
    return made_of("page", tokens[: (index + 1) * PAGE + 1], PAGE_BYTES)


def keep(cache: PrefixCache, tokens, kind="end", media=()) -> bool:
    return cache.keep(tokens, kind, lambda: state_of(tokens), lambda indices: [page_of(tokens, index) for index in indices], media)


def turn(number: int) -> list[int]:
    """One of 105 prompts, many of which begin alike."""
    return [number % 7] * (PAGE * (number % 5) + number % 3 * 40 + 1)


def assert_image(image, tokens):
    """The image is that of exactly these tokens."""
    assert image.length == len(tokens) and len(image.pages) == -(-len(tokens) // PAGE)
    assert image.state.tobytes() == state_of(tokens).tobytes()
    for index, page in enumerate(image.pages):
        assert page.tobytes() == page_of(tokens, index).tobytes()


@pytest.fixture
def make():
    """A cache, by its budgets; its notices are in `.told`."""

    def new(host=1 << 20, folder=None, disk=1 << 20, identity=None):
        told = []
        cache = PrefixCache(
            PAGE_BYTES,
            STATE_BYTES,
            host,
            folder=folder,
            disk_bytes=disk,
            identity=IDENTITY if identity is None else identity,
            notice=told.append,
        )
        cache.told = told
        return cache

    return new
