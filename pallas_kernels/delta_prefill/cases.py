"""Prefill chunks of the 27B's delta layers: shared by tests, compile checks and the lab."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.delta_prefill import chunk_kernel, kernel, reference
from pallas_kernels.delta_prefill.inputs_kernel import BLOCK
from pallas_kernels.delta_prefill.parts import dots
from pallas_kernels.lab import rows

EPS = 1e-6
MMA = 16 * 8 * 16  # multiply-adds of one tensor-core instruction


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `delta_prefill`: `count` of `tokens` tokens into the last of `slots` slots."""

    name: str
    tokens: int
    count: int
    slots: int = 1
    key_heads: int = 16
    value_heads: int = 48
    dim: int = 128
    width: int = 4

    op = "delta_prefill"
    donate = (2, 3)
    allowed_error = 4e-3

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim

    @property
    def inner(self) -> int:
        return self.value_heads * self.dim

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct, number = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.int32)
        return [
            struct((self.tokens, self.channels + self.inner), jnp.bfloat16),
            struct((self.tokens, 2 * self.value_heads), jnp.bfloat16),
            struct((self.slots, self.width - 1, self.channels), jnp.bfloat16),
            struct((self.slots, self.value_heads, self.dim, self.dim), jnp.float32),
            struct((self.channels, 1, self.width), jnp.float32),
            struct((self.value_heads,), jnp.float32),
            struct((self.value_heads,), jnp.float32),
            struct((self.dim,), jnp.float32),
            number,
            number,
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        return kernel.delta_prefill(*arguments, eps=EPS, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`: states and gates of the size they have in the model."""
        scales = (1.0, 2.0, 1.0, 0.1, 0.4, 1.0, 1.0, 0.2)
        drawn = [
            (scale * jax.random.normal(k, s.shape, jnp.float32)).astype(s.dtype)
            for k, s, scale in zip(jax.random.split(key, len(scales)), self.arguments()[: len(scales)], scales, strict=True)
        ]
        drawn[7] = 1.0 + drawn[7]
        return [*drawn, jnp.int32(self.slots - 1), jnp.int32(self.count)]

    def reference(self, *arguments: Any) -> Any:
        out, conv, recurrent = reference.delta_prefill(*arguments, eps=EPS)
        # Rows of padding are anything finite there and zeros in the kernel.
        return jnp.where(jnp.arange(self.tokens)[:, None] < self.count, out, 0), conv, recurrent

    @property
    def slot_bytes(self) -> int:
        """State and window of one slot."""
        return 4 * self.inner * self.dim + 2 * (self.width - 1) * self.channels

    @property
    def weight_bytes(self) -> int:
        return self.ideal_bytes

    @property
    def ideal_bytes(self) -> int:
        """Inputs, small weights and outputs once; the slot's state and window read and written."""
        inputs = 2 * self.tokens * (self.channels + self.inner + 2 * self.value_heads)
        weights = 4 * (self.channels * self.width + 2 * self.value_heads + self.dim)
        return inputs + weights + 2 * self.tokens * self.inner + 2 * self.slot_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the launches leave for each other: mixed inputs, block matrices, outputs before the norm; gates, factors."""
        parts = chunk_kernel.W_PARTS + chunk_kernel.M_PARTS
        per_head = 2 * parts * BLOCK + 4 * self.dim + 4 * 3 + 4 * 3
        return self.tokens * (2 * self.channels + self.value_heads * per_head + 4 * 2 * self.key_heads)

    def moved_bytes(self, report: Any) -> int:
        """Bytes as the lab counts them, less the states of the other slots, which no launch touches."""
        return rows.moved_bytes(report) - 2 * (self.slots - 1) * self.slot_bytes

    def tensor_ops_by_launch(self) -> dict[str, int]:
        """Warp-wide tensor-core instructions of each launch that has some, of a call with every token valid."""
        square, w, m = BLOCK * BLOCK, chunk_kernel.W_PARTS, chunk_kernel.M_PARTS
        doublings = BLOCK.bit_length() - 2
        block = square * (2 * self.dim + BLOCK * (2 * doublings * dots(3, 3) + dots(m, m)))
        # k reads three parts of the state and writes three, q reads two.
        state = self.dim * BLOCK * (self.dim * (3 + 3 + 2) + BLOCK * (dots(3, w) + dots(m, m)))
        per = self.value_heads * (self.tokens // BLOCK)
        return {"delta_prefill_blocks": per * block // MMA, "delta_prefill_state": per * state // MMA}

    def tensor_ops(self) -> int:
        """Those of the launch that the lab's rows describe, the one with most machine code x threads."""
        return self.tensor_ops_by_launch()["delta_prefill_blocks"]

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds on tensor cores, all launches: parts count each."""
        return MMA * sum(self.tensor_ops_by_launch().values())


CASES = (
    Case("1024x1of1", tokens=1024, count=1024),
    Case("2048x1of1", tokens=2048, count=2048),
    Case("1024x1of4", tokens=1024, count=1000, slots=4),
)
# Twins a CPU interprets in seconds: a count that ends inside a block, one that fills every block, a single token.
SMALL = (
    Case("1024x1of1.small", tokens=192, count=150, key_heads=2, value_heads=6),
    Case("2048x1of1.small", tokens=128, count=128, key_heads=2, value_heads=2),
    Case("1024x1of4.small", tokens=128, count=1, slots=3, key_heads=1, value_heads=3, dim=64),
)
