"""Decode rows of the 27B's delta layers: shared by tests, compile checks and the lab."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.delta_decode import cpu, kernel, reference
from pallas_kernels.delta_rule import Layout, Transitions, ring_rows
from pallas_kernels.lab import rows
from pallas_kernels.lab.on_cpu import OnCpu

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes that a call's shapes follow from, for decode and fold alike."""

    name: str
    slots: int
    rows: int
    key_heads: int = 16
    value_heads: int = 48
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    room: int = 0  # rows a slot that the rings are made for, where more than `rows`

    itemsize = 2  # of an activation

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Values, and gates, of a token."""
        return self.value_heads * self.value_dim

    @property
    def tokens(self) -> int:
        return self.slots * self.rows

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.slots, self.value_heads, self.key_dim, self.value_dim

    @property
    def layout(self) -> Layout:
        return Layout(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    @property
    def ring(self) -> int:
        return ring_rows(max(self.rows, self.room), self.width)

    @property
    def conv_shape(self) -> tuple[int, ...]:
        return self.slots, self.ring, self.channels

    @property
    def records_shape(self) -> tuple[int, ...]:
        return self.slots, self.ring, self.layout.columns

    @property
    def state_bytes(self) -> int:
        return 4 * self.slots * self.inner * self.key_dim

    @property
    def conv_bytes(self) -> int:
        """Bytes of one window per slot."""
        return self.itemsize * self.slots * (self.width - 1) * self.channels

    @property
    def raw_bytes(self) -> int:
        """Bytes of the convolution inputs of a pass."""
        return self.itemsize * self.tokens * self.channels

    @property
    def record_bytes(self) -> int:
        """k, v, decay and beta of every row, float32."""
        return 4 * self.tokens * self.layout.columns

    def ring_bytes(self) -> tuple[int, int]:
        """Bytes of both rings whole: raw inputs and records."""
        return self.itemsize * self.slots * self.ring * self.channels, 4 * self.slots * self.ring * self.layout.columns

    @property
    def weight_bytes(self) -> int:
        """The states, read and written: what a call moves is nearly all theirs."""
        return 2 * self.state_bytes

    def tensor_ops(self) -> int:
        return 0

    def other_trips(self) -> tuple[int, ...]:
        """Passes of the loop over the rows that wait."""
        return (self.rows,)

    def sample_records(self, key: jax.Array) -> jax.Array:
        """Random records of the size they have in the model."""
        keys = jax.random.split(key, 4)
        shapes = jax.eval_shape(self.layout.unpack, jax.ShapeDtypeStruct(self.records_shape, jnp.float32))
        k, v, decay, beta = (jax.random.normal(key, s.shape) for key, s in zip(keys, shapes, strict=True))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        return self.layout.pack(Transitions(k, v, jax.nn.sigmoid(3 + decay), jax.nn.sigmoid(beta)))

    def sample_waiting(self) -> tuple[jax.Array, jax.Array]:
        """start and count of every slot: all rows wait in the first slot, one less in the next; the rings wrap."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        return (self.ring - 1 + slot) % self.ring, (self.rows - slot) % (self.rows + 1)


@dataclasses.dataclass(frozen=True)
class Case(Heads):
    """One call of `delta_decode`; figures are those of a call in which as many rows wait in every slot as it adds."""

    op = "delta_decode"
    donate = (2, 3, 4)
    allowed_error = 4e-3

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        return [
            struct((self.tokens, self.channels + self.inner), jnp.bfloat16),
            struct((self.tokens, 2 * self.value_heads), jnp.bfloat16),
            struct(self.conv_shape, jnp.bfloat16),
            struct(self.state_shape, jnp.float32),
            struct(self.records_shape, jnp.float32),
            struct((self.slots,), jnp.int32),
            struct((self.slots,), jnp.int32),
            struct((self.channels, 1, self.width), jnp.float32),
            struct((self.value_heads,), jnp.float32),
            struct((self.value_heads,), jnp.float32),
            struct((self.value_dim,), jnp.float32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        return kernel.delta_decode(*arguments, rows=self.rows, eps=EPS, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`: states and gates of the size they have in the model."""
        keys = jax.random.split(key, 11)
        scales = (1.0, 2.0, 1.0, 0.1, 1.0, 0, 0, 0.1, 0.4, 1.0, 0.2)
        drawn = [
            (scale * jax.random.normal(k, s.shape, jnp.float32)).astype(s.dtype)
            for k, s, scale in zip(keys, self.arguments(), scales, strict=True)
        ]
        drawn[4:7] = self.sample_records(keys[4]), *self.sample_waiting()
        drawn[10] = 1.0 + drawn[10]
        return drawn

    def reference(self, *arguments: Any) -> Any:
        return reference.delta_decode(*arguments, zero=jnp.int32(0), rows=self.rows, eps=EPS)

    @property
    def ideal_bytes(self) -> int:
        """States read and written, inputs, windows, taps and small weights, old records read; raw inputs, new records
        and outputs written."""
        inputs = self.itemsize * self.tokens * (self.channels + self.inner + 2 * self.value_heads) + self.conv_bytes
        weights = 4 * (self.channels * self.width + 2 * self.value_heads + self.value_dim)
        rings = self.raw_bytes + 2 * self.record_bytes
        return 2 * self.state_bytes + inputs + weights + rings + self.itemsize * self.tokens * self.inner

    def moved_bytes(self, report: Any) -> int:
        """Bytes of what is touched: of the rings a call reads and writes parts."""
        raw, records = self.ring_bytes()
        touched = self.conv_bytes + self.raw_bytes + 2 * self.record_bytes
        return rows.moved_bytes(report) - 2 * (raw + records) + touched

    @property
    def multiply_adds(self) -> int:
        """Five per element of the state and row (two for one that waited, three for a new one), and the convolution's."""
        return self.tokens * (5 * self.inner * self.key_dim + self.channels * self.width)


class OnACpu(OnCpu, Case):
    allowed_error = 1e-5

    def run(self, *arguments: Any) -> Any:
        return cpu.delta_decode(*arguments, rows=self.rows, eps=EPS)


CASES = (Case("1x1", slots=1, rows=1), Case("1x4", slots=1, rows=4), Case("1x6", slots=1, rows=6), Case("4x4", slots=4, rows=4))
# Twins a CPU interprets in a moment.
SMALL = (
    Case("1x1.small", slots=1, rows=1, key_heads=2, value_heads=6),
    Case("1x4.small", slots=1, rows=4, key_heads=2, value_heads=6, key_dim=64),
    Case("1x6.small", slots=1, rows=6, key_heads=2, value_heads=6, key_dim=64, value_dim=64),
    Case("4x4.small", slots=3, rows=4, key_heads=2, value_heads=6, key_dim=64, value_dim=64),
)
# Of the 27B, and of a hybrid of 149 million parameters.
ON_CPU = (
    *(OnACpu(f"cpu.{c.name}", slots=c.slots, rows=c.rows) for c in CASES),
    OnACpu("cpu.149M", slots=1, rows=1, key_heads=4, value_heads=8),
)
