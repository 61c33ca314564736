"""Replay of accepted rows in the 27B's delta layers: shared by tests, compile checks and the lab."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.delta_decode.cases import Heads
from pallas_kernels.delta_fold import kernel, reference
from pallas_kernels.delta_rule import Transitions
from pallas_kernels.lab import rows


@dataclasses.dataclass(frozen=True)
class Case(Heads):
    """One call of `delta_fold`; figures are those of a call that accepts every row of every slot."""

    op = "delta_fold"
    donate = (0, 1)
    allowed_error = 1e-5

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct, gates = jax.ShapeDtypeStruct, (self.slots, self.rows, self.value_heads)
        return [
            struct(self.state_shape, jnp.float32),
            struct(self.conv_shape, jnp.bfloat16),
            Transitions(
                struct((self.slots, self.rows, self.key_heads, self.key_dim), jnp.float32),
                struct((*gates, self.value_dim), jnp.float32),
                struct(gates, jnp.float32),
                struct(gates, jnp.float32),
            ),
            struct((self.tokens, self.channels + self.inner), jnp.bfloat16),
            struct((self.slots,), jnp.int32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        return kernel.delta_fold(*arguments, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`; slots accept none, one, .. of their rows in turn."""
        keys = jax.random.split(key, 7)
        state, conv, records, projected, _ = self.arguments()
        k, v, decay, beta = (jax.random.normal(key, s.shape) for key, s in zip(keys, records))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        return [
            0.1 * jax.random.normal(keys[4], state.shape),
            jax.random.normal(keys[5], conv.shape, jnp.bfloat16),
            Transitions(k, v, jax.nn.sigmoid(3 + decay), jax.nn.sigmoid(beta)),
            jax.random.normal(keys[6], projected.shape, jnp.bfloat16),
            (self.rows - jnp.arange(self.slots)) % (self.rows + 1),
        ]

    def reference(self, *arguments: Any) -> Any:
        return reference.delta_fold(*arguments, jnp.int32(0))

    @property
    def ideal_bytes(self) -> int:
        """States and windows read and written, records and raw inputs read."""
        return 2 * (self.state_bytes + self.conv_bytes) + self.record_bytes + 2 * self.tokens * self.channels

    def moved_bytes(self, report: Any) -> int:
        """The gates among `projected` are not read."""
        return rows.moved_bytes(report) - 2 * self.tokens * self.inner

    @property
    def multiply_adds(self) -> int:
        """Two per element of the state and row: one read-out, one update."""
        return 2 * self.tokens * self.inner * self.key_dim

    def other_trips(self) -> tuple[int, ...]:
        return (self.rows,)


CASES = (
    Case("1x4", slots=1, rows=4),
    Case("4x4", slots=4, rows=4),
)
# Twins a CPU interprets in a moment; with three slots or more, one accepts nothing.
SMALL = (
    Case("1x4.small", slots=1, rows=4, key_heads=2, value_heads=6),
    Case("4x4.small", slots=3, rows=2, key_heads=2, value_heads=6, key_dim=64, value_dim=64),
)
