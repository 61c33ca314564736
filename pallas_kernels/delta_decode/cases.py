"""Decode rows of the 27B's delta layers: shared by tests, compile checks and the lab."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.delta_decode import kernel, reference

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Heads:
    """What a call's shapes follow from, for decode and fold alike."""

    name: str
    slots: int
    rows: int
    key_heads: int = 16
    value_heads: int = 48
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4

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
    def conv_shape(self) -> tuple[int, ...]:
        return self.slots, self.width - 1, self.channels

    @property
    def state_bytes(self) -> int:
        return 4 * self.slots * self.inner * self.key_dim

    @property
    def conv_bytes(self) -> int:
        return 2 * self.slots * (self.width - 1) * self.channels

    @property
    def record_bytes(self) -> int:
        """k, v, decay and beta of every row, float32."""
        return 4 * self.tokens * (self.key_heads * self.key_dim + self.inner + 2 * self.value_heads)

    @property
    def weight_bytes(self) -> int:
        """The states: what a call reads is nearly all theirs."""
        return self.state_bytes

    def tensor_ops(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Case(Heads):
    """One call of `delta_decode`."""

    op = "delta_decode"
    allowed_error = 4e-3

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        return [
            struct((self.tokens, self.channels + self.inner), jnp.bfloat16),
            struct((self.tokens, 2 * self.value_heads), jnp.bfloat16),
            struct(self.conv_shape, jnp.bfloat16),
            struct(self.state_shape, jnp.float32),
            struct((self.channels, 1, self.width), jnp.float32),
            struct((self.value_heads,), jnp.float32),
            struct((self.value_heads,), jnp.float32),
            struct((self.value_dim,), jnp.float32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        return kernel.delta_decode(*arguments, rows=self.rows, eps=EPS, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`: states and gates of the size they have in the model."""
        keys = jax.random.split(key, 8)
        scales = (1.0, 2.0, 1.0, 0.1, 0.4, 1.0, 1.0, 0.2)
        drawn = [
            (scale * jax.random.normal(k, s.shape, jnp.float32)).astype(s.dtype)
            for k, s, scale in zip(keys, self.arguments(), scales)
        ]
        drawn[7] = 1.0 + drawn[7]
        return drawn

    def reference(self, *arguments: Any) -> Any:
        return reference.delta_decode(*arguments, jnp.int32(0), rows=self.rows, eps=EPS)

    @property
    def ideal_bytes(self) -> int:
        """States, inputs, taps and small weights, outputs and records, each once."""
        inputs = 2 * self.tokens * (self.channels + self.inner + 2 * self.value_heads) + self.conv_bytes
        weights = 4 * (self.channels * self.width + 2 * self.value_heads + self.value_dim)
        return self.state_bytes + inputs + weights + self.record_bytes + 2 * self.tokens * self.inner

    @property
    def multiply_adds(self) -> int:
        """Three per element of the state and row (two read-outs, one update), and the convolution's."""
        return self.tokens * (3 * self.inner * self.key_dim + self.channels * self.width)


CASES = (
    Case("1x1", slots=1, rows=1),
    Case("1x4", slots=1, rows=4),
    Case("1x6", slots=1, rows=6),
    Case("4x4", slots=4, rows=4),
)
# Twins a CPU interprets in a moment.
SMALL = (
    Case("1x1.small", slots=1, rows=1, key_heads=2, value_heads=6),
    Case("1x4.small", slots=1, rows=4, key_heads=2, value_heads=6, key_dim=64),
    Case("1x6.small", slots=1, rows=6, key_heads=2, value_heads=6, key_dim=64, value_dim=64),
    Case("4x4.small", slots=3, rows=4, key_heads=2, value_heads=6, key_dim=64, value_dim=64),
)
