"""Settling the states of the 27B's delta layers: shared by tests, compile checks and the lab."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.delta_decode.cases import Heads
from pallas_kernels.delta_fold import cpu, kernel, reference
from pallas_kernels.lab import rows
from pallas_kernels.lab.on_cpu import OnCpu


@dataclasses.dataclass(frozen=True)
class Case(Heads):
    """One call of `delta_fold`; figures are those of a call before which as many rows wait in every slot as may."""

    op = "delta_fold"
    donate = (0, 1)
    allowed_error = 1e-5

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        return [
            struct(self.state_shape, jnp.float32),
            struct(self.conv_shape, jnp.bfloat16),
            struct(self.records_shape, jnp.float32),
            struct((self.slots,), jnp.int32),
            struct((self.slots,), jnp.int32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        return kernel.delta_fold(*arguments, width=self.width, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`; all rows wait in the first slot, one less in the next, and so on."""
        keys = jax.random.split(key, 3)
        state, conv = (
            0.1 * jax.random.normal(keys[0], self.state_shape),
            jax.random.normal(keys[1], self.conv_shape, jnp.bfloat16),
        )
        return [state, conv, self.sample_records(keys[2]), *self.sample_waiting()]

    def reference(self, *arguments: Any) -> Any:
        return reference.delta_fold(*arguments, zero=jnp.int32(0), width=self.width)

    @property
    def ideal_bytes(self) -> int:
        """States and windows read and written, waiting records read."""
        return 2 * (self.state_bytes + self.conv_bytes) + self.record_bytes

    def moved_bytes(self, report: Any) -> int:
        """Bytes of what is touched: of the rings a call touches parts."""
        raw, records = self.ring_bytes()
        return rows.moved_bytes(report) - 2 * (raw - self.conv_bytes) - (records - self.record_bytes)

    @property
    def multiply_adds(self) -> int:
        """Two per element of the state and row: one read-out, one update."""
        return 2 * self.tokens * self.inner * self.key_dim


class OnACpu(OnCpu, Case):
    def run(self, *arguments: Any) -> Any:
        return cpu.delta_fold(*arguments, width=self.width)


CASES = (Case("1x4", slots=1, rows=4), Case("4x4", slots=4, rows=4))
# Twins a CPU interprets in a moment; with three slots, nothing waits in one.
SMALL = (
    Case("1x4.small", slots=1, rows=4, key_heads=2, value_heads=6),
    Case("4x4.small", slots=3, rows=2, key_heads=2, value_heads=6, key_dim=64, value_dim=64),
)
ON_CPU = tuple(OnACpu(f"cpu.{c.name}", slots=c.slots, rows=c.rows) for c in CASES)
