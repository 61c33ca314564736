"""A snapshot as one array of bytes on the host, and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ninfer_jax.programs import Snapshot


def to_bytes(given: Snapshot) -> np.ndarray:
    """All of `given`, field after field, uint8 `[staging_bytes]`."""
    leaves: list[Any] = jax.tree.leaves(given)
    for leaf in leaves:
        leaf.copy_to_host_async()
    return np.concatenate([np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves])


def from_bytes(data: np.ndarray, struct: Snapshot) -> Snapshot:
    """The snapshot that `data` was made of. struct: leaves of the same shapes and dtypes."""
    leaves, at = [], 0
    for leaf in jax.tree.leaves(struct):
        size = leaf.size * leaf.dtype.itemsize
        # A copy where the place is odd: compiled programs take arrays that are aligned.
        leaves.append(np.require(data[at : at + size].view(leaf.dtype).reshape(leaf.shape), requirements="A"))
        at += size
    return jax.tree.unflatten(jax.tree.structure(struct), leaves)
