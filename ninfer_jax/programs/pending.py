"""Accepted rows that wait: a round reads and writes each recurrent state once, so what it accepts enters with the next one.

To look at states from outside, or to append to a slot by other means than
a round, settle them first: `prefill` does so for its slot, `Programs.settle` for all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.state import State
from pallas_kernels.delta_fold import delta_fold
from pallas_kernels.elementary import opaque_zero


def accept(state: State, active: jax.Array, emitted: jax.Array) -> State:
    """After a pass: of its rows the first `emitted[slot]` stay. active bool and emitted int32 `[S]`, those of the pass."""
    pending = state.pending
    if not pending.records:
        return state
    after = (pending.start + pending.count) % pending.records[0].shape[1]
    start, count = jnp.where(active, after, pending.start), jnp.where(active, emitted, pending.count)
    return state._replace(pending=pending._replace(start=start, count=count))


def settle(state: State, width: int, slot: jax.Array | None = None) -> State:
    """`state` with nothing waiting in `slot` (int32 scalar; None: in any): recurrent states are up to date, and the first
    `width` - 1 rows of conv are the window of the convolution, of `width` taps. Costs the other slots nothing."""
    pending = state.pending
    mine = True if slot is None else jnp.arange(len(pending.count)) == slot
    count = jnp.where(mine, pending.count, -1)
    zero = opaque_zero(state.slots.length)
    settled = [
        delta_fold(s, c, r, pending.start, count, zero, width=width)
        for s, c, r in zip(state.recurrent, state.conv, pending.records, strict=True)
    ]
    pending = pending._replace(start=jnp.where(mine, 0, pending.start), count=jnp.where(mine, 0, pending.count))
    return state._replace(recurrent=tuple(s for s, _ in settled), conv=tuple(c for _, c in settled), pending=pending)
