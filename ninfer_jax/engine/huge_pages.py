"""Weights of a CPU engine in large memory pages.

A decode step streams every weight once. 500 MB are 122,000 pages of 4 KiB whose addresses the processor looks up, or 239
pages of 2 MiB; a step from small ones took 4 % longer (measured, docs/benchmarks.md). Linux gives large ones to whoever asks,
in most distributions to no one else.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import jax
import numpy as np

from ninfer_jax.model import join_and_put

PAGE = 2 << 20  # bytes; x86-64's and, with pages of 4 KiB below, ARM's


def on_cpu(parts: Sequence[np.ndarray]) -> jax.Array:
    """Arrays of one dtype laid one after another along their first axis, as one array of the CPU; what fills a large page
    or more lies in large pages where the system has them."""
    first = np.asarray(parts[0])
    shape = (sum(p.shape[0] for p in parts), *first.shape[1:]) if first.ndim else ()
    if not _large(shape, first.dtype):
        return join_and_put(parts)
    joined = _in_place(parts, shape)
    if joined is None:
        joined, start = empty(shape, first.dtype), 0
        for part in parts:
            joined[start : start + part.shape[0]] = part
            start += part.shape[0]
    # Aligned host memory is not copied by JAX's CPU client: the array keeps it, and nobody else holds `joined`.
    return jax.device_put(joined)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array for `on_cpu` to keep instead of copying it; so it does with the whole of it, cut along the first axis or not."""
    if not _large(shape, dtype):
        return np.empty(shape, dtype)
    return _memory(_nbytes(shape, dtype)).view(dtype).reshape(shape)


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _large(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    return _nbytes(shape, dtype) >= PAGE and hasattr(mmap, "MADV_HUGEPAGE")


def _in_place(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
    """The parts as one array where they are the whole of an `empty`, in order."""
    first = parts[0]
    if not isinstance(first, np.ndarray) or first.ctypes.data % PAGE:
        return None
    at = first.ctypes.data
    for part in parts:
        if not isinstance(part, np.ndarray) or part.base is not first.base or part.ctypes.data != at or not part.flags.c_contiguous:
            return None
        at += part.nbytes
    return np.lib.stride_tricks.as_strided(first, shape, first.strides)


def _memory(nbytes: int) -> np.ndarray:
    """uint8 `[nbytes]`, zeros, at the start of a large page."""
    room = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them: small pages hold the same numbers
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(room, np.uint8)
    offset = -whole.ctypes.data % PAGE
    return whole[offset : offset + nbytes]
