"""Grammars on their way to the device: masks of the rows that the next draws are about to have."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import numpy as np

from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease

Planned = tuple[Lease, np.ndarray, np.ndarray]


def plan(sequences: Iterable[Sequence], drafts: np.ndarray) -> list[Planned]:
    """Arguments of `SlotPool.constrain`, for those with a grammar whose next draw it binds; drafts int32 `[slots, K]`.

    All that was drawn for them must be booked. One whose grammar cannot go on ends here, and nobody else. For outside of
    a transaction: this is work of the host alone.
    """
    found = []
    for sequence in sequences:
        guide, lease = sequence.guide, sequence.lease
        if guide is None or sequence.finished:
            continue
        assert lease is not None  # it takes part
        try:
            planned = None if guide.error else guide.plan(drafts[lease.slot].tolist())
            error = guide.error
        except Exception as failure:
            planned, error = None, traceback.format_exception_only(failure)[0].splitlines()[0]
        if error:
            sequence.fail(error)
            lease.end()
        elif planned is not None:
            found.append((lease, *planned))
    return found
