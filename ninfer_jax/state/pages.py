"""Owners of pages: a free list on the host, handed to the device as block-table rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ninfer_jax.config import PAGE


class PageAllocator:
    """Pages 1..pages-1 of the pools; page 0 stays ownerless. A request reserves all it may ever need at admission, so a
    running sequence can never starve. A page may have several owners, none of whom may write to it; it is free when the last
    has given it back."""

    def __init__(self, pages: int, pages_per_slot: int):
        self._free = list(range(pages - 1, 0, -1))
        self._owners = np.zeros(pages, np.int32)
        self._per_slot = pages_per_slot
        self.total = pages - 1

    @property
    def free_tokens(self) -> int:
        return len(self._free) * PAGE

    def owners(self) -> np.ndarray:
        """Owners of each page, int32 `[pages]`: a copy."""
        return self._owners.copy()

    def fits(self, tokens: int, shared: int = 0) -> bool:
        """Whether there is room for `tokens`, of whose pages so many are there already."""
        return -(-tokens // PAGE) - shared <= len(self._free)

    def reserve(self, tokens: int, shared: Iterable[int] = ()) -> np.ndarray:
        """Block-table row int32 `[pages_per_slot]` with room for `tokens`: first the pages `shared`, which get one more owner,
        then free ones. ValueError if the pool has not enough."""
        first = np.fromiter(shared, np.int32)
        count = -(-tokens // PAGE)
        if count > self._per_slot or count - len(first) > len(self._free):
            raise ValueError(f"{tokens} tokens need {count} pages, {len(self._free)} are free and a slot may hold {self._per_slot}")
        if len(first) > count:
            raise ValueError(f"{tokens} tokens need {count} pages, {len(first)} are to be shared")
        row = np.zeros(self._per_slot, np.int32)
        self.share(first)
        row[: len(first)] = first
        row[len(first) : count] = self.take(count - len(first))
        return row

    def take(self, count: int) -> np.ndarray:
        """So many free pages, int32, with one owner each from now on; ValueError if there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for, {len(self._free)} are free")
        pages = np.asarray(self._free[: -count - 1 : -1], np.int32)
        del self._free[len(self._free) - count :]
        self._owners[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more owner for each of `pages`; ValueError if one of them has none, then none gets any."""
        free = pages[self._owners[pages] == 0]
        if len(free):
            raise ValueError(f"page {free[0]} is shared, but nobody owns it")
        np.add.at(self._owners, pages, 1)

    def release(self, row: np.ndarray) -> None:
        """One owner less for each page of a row, zeros passed over. ValueError if nobody owns one of them; then none is given
        back."""
        pages = row[row > 0]
        twice = pages[self._owners[pages] == 0]
        if len(twice):
            raise ValueError(f"page {twice[0]} is given back, but nobody owns it")
        self._owners[pages] -= 1
        self._free.extend(pages[self._owners[pages] == 0][::-1].tolist())
