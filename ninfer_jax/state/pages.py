"""Owners of pages: a free list on the host, handed to the device as block-table rows."""

from __future__ import annotations

import numpy as np

from ninfer_jax.config import PAGE


class PageAllocator:
    """Pages 1..pages-1 of the pools; page 0 stays ownerless. A request reserves all it may ever need at admission, so a
    running sequence can never starve."""

    def __init__(self, pages: int, pages_per_slot: int):
        self._free = list(range(pages - 1, 0, -1))
        self._owned = np.zeros(pages, np.bool_)
        self._per_slot = pages_per_slot
        self.total = pages - 1

    @property
    def free_tokens(self) -> int:
        return len(self._free) * PAGE

    def fits(self, tokens: int) -> bool:
        return -(-tokens // PAGE) <= len(self._free)

    def reserve(self, tokens: int) -> np.ndarray:
        """Block-table row int32 `[pages_per_slot]` with room for `tokens`; ValueError if the pool has not enough."""
        count = -(-tokens // PAGE)
        if count > min(len(self._free), self._per_slot):
            raise ValueError(f"{tokens} tokens need {count} pages, {len(self._free)} are free and a slot may hold {self._per_slot}")
        row = np.zeros(self._per_slot, np.int32)
        row[:count] = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        self._owned[row[:count]] = True
        return row

    def release(self, row: np.ndarray) -> None:
        """Give a row's pages back. ValueError if nobody owns one of them; then none is given back."""
        pages = row[row > 0]
        twice = pages[~self._owned[pages]]
        if len(twice):
            raise ValueError(f"page {twice[0]} is given back, but nobody owns it")
        self._owned[pages] = False
        self._free.extend(pages[::-1].tolist())
