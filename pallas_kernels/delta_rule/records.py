"""Records of a verify pass: what it leaves of its rows until the accepted ones enter the state, in a ring a slot.

A row of the ring is one row of a pass, flat: k of every key head, v of every value head, decay and beta of every value
head, float32 (`delta_rule.Transitions` in one array). The rows that a pass reads (accepted by the one before) and those
that it writes are different rows of the ring: one launch does both while its blocks share records of k.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_rule import step
from pallas_kernels.delta_rule.recurrent import Transitions


def ring_rows(rows: int, width: int) -> int:
    """Rows of the rings of records and of raw convolution inputs, for passes of `rows` rows and `width` taps: a pass
    reads `rows` records and `width` - 1 raw inputs, and writes `rows` of either behind them."""
    return max(2 * rows, width - 1 + rows)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns of the numbers of a record."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Columns of k, of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of v, of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Columns of a record: k, v, and decay and beta of every value head."""
        return self.keys + self.values + 2 * self.value_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def share(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    def pack(self, rows: Transitions) -> jax.Array:
        """Records `[slots, rows, columns]`."""
        lead = rows.beta.shape[:2]
        return jnp.concatenate([x.reshape(*lead, -1) for x in rows], axis=-1)

    def unpack(self, records: jax.Array) -> Transitions:
        """The parts of records `[slots, rows, columns]`."""
        lead = records.shape[:2]
        ends = (self.keys, self.keys + self.values, self.keys + self.values + self.value_heads)
        k, v, decay, beta = jnp.split(records, ends, axis=-1)
        k = k.reshape(*lead, self.key_heads, self.key_dim)
        return Transitions(k, v.reshape(*lead, self.value_heads, self.value_dim), decay, beta)

    def load(self, ref: Any, slot: Any, at: Any, head: Any) -> tuple[jax.Array, ...]:
        """In a kernel: k `[key_dim]`, v `[value_dim]`, decay and beta of a value head from row `at` of the ring."""
        key_head = head // self.share
        gates = self.keys + self.values + head
        return (
            launch.load(ref, (slot, at, pl.ds(key_head * self.key_dim, self.key_dim))),
            launch.load(ref, (slot, at, pl.ds(self.keys + head * self.value_dim, self.value_dim))),
            launch.load(ref, (slot, at, gates)),
            launch.load(ref, (slot, at, gates + self.value_heads)),
        )

    def store(self, ref: Any, slot: Any, at: Any, head: Any, qk: Any, v: Any, decay: Any, beta: Any) -> None:
        """In a kernel: a value head's part of row `at`. k is row 1 of qk `[2, key_dim]`; the first of the heads that
        share it writes it."""
        is_k = jnp.broadcast_to(jnp.arange(2)[:, None] == 1, qk.shape)
        dims = jnp.broadcast_to(jnp.arange(self.key_dim)[None], qk.shape)
        launch.store(ref, (slot, at, head // self.share * self.key_dim + dims), qk, is_k & (head % self.share == 0))
        launch.store(ref, (slot, at, pl.ds(self.keys + head * self.value_dim, self.value_dim)), v)
        launch.store(ref, (slot, at, self.keys + self.values + head), decay)
        launch.store(ref, (slot, at, self.keys + self.values + self.value_heads + head), beta)


def replay(
    state: step.Chunks, ref: Any, slot: Any, start: Any, count: Any, head: Any, layout: Layout, interpret: bool
) -> step.Chunks:
    """In a kernel: a head's state after the `count` records from row `start` of the ring on. The count is data."""
    ring = ref.shape[1]

    def load(row: Any) -> tuple[jax.Array, ...]:
        # One row is asked for too many: the last one again, since another block may be writing the one behind it.
        return layout.load(ref, slot, jax.lax.rem(start + ring + jnp.minimum(row, count - 1), ring), head)

    def one(row: Any, carry: tuple) -> tuple:
        state, (k, v, decay, beta) = carry
        following = load(row + 1)  # arrives while this one is folded
        k = step.columns(k, layout.value_dim)
        u = step.update(state, k, v, decay, beta, interpret)
        return step.advance(state, k, u, decay, interpret), following

    return jax.lax.fori_loop(0, count, one, (state, load(0)))[0]
