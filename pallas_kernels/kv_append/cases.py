"""Attention's inputs of the 27B at every KV format: verify rows of four slots, and a prefill chunk of one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import kv_codecs
from pallas_kernels.kv_append import cpu, kernel, reference
from pallas_kernels.kv_pages import PAGE, KVPages, pages_struct
from pallas_kernels.lab import rows
from pallas_kernels.lab.on_cpu import OnCpu

EPS = 1e-6
ROPE_THETA = 1e7


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `attention_inputs`; `slots` share the rows evenly, 0: one slot whose table row all tokens share.

    head_dim `dims`, `half` rotary pairs, a table of `pages_per_slot` pages, and a pool with as many and page 0.
    """

    name: str
    format: str
    tokens: int = 16
    slots: int = 4
    query_heads: int = 24
    kv_heads: int = 4
    dims: int = 256
    half: int = 32
    pages_per_slot: int = 262144 // PAGE

    op = "kv_append"
    itemsize = 2  # of an activation
    donate = (5,)
    multiply_adds = 0
    # The reference rounds both products of the rotary embedding, the kernel their sum: some codes fall the other way, and
    # one changes a word by up to its own size.
    allowed_error = 2e-2

    @property
    def pages(self) -> int:
        """Pages of the pool, page 0 included."""
        return self.pages_per_slot + 1

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        shared = (self.pages_per_slot,)
        return [
            struct((self.tokens, 2 * (self.query_heads + self.kv_heads) * self.dims), jnp.bfloat16),
            struct((self.dims,), jnp.float32),
            struct((self.dims,), jnp.float32),
            struct((self.tokens, self.half), jnp.bfloat16),
            struct((self.tokens, self.half), jnp.bfloat16),
            pages_struct(self.format, self.pages, self.kv_heads, self.dims),
            struct((self.tokens, *shared) if self.slots else shared, jnp.int32),
            struct((self.tokens,), jnp.int32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> tuple[jax.Array, KVPages]:
        """The kernel alone."""
        return kernel.attention_inputs(*arguments, format=self.format, eps=EPS, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`; the slots own different pages of a pool of ones."""
        projected, q_norm, k_norm, *_, pool, table, _ = self.arguments()
        keys = jax.random.split(key, 4)
        slots = max(self.slots, 1)
        own = jax.random.permutation(keys[3], self.pages - 1)[: self.pages_per_slot // slots * slots].reshape(slots, -1) + 1
        own = jnp.pad(own, ((0, 0), (0, self.pages_per_slot - own.shape[1])))
        each = -(-self.tokens // slots)
        row = jnp.arange(self.tokens)
        # The rows of a slot end with its last page but one, and cross from one page to the next.
        positions = (self.pages_per_slot // slots - 1) * PAGE - each // 2 + row % each
        angles = positions[:, None] * ROPE_THETA ** (-jnp.arange(self.half) / self.half)
        return [
            jax.random.normal(keys[0], projected.shape, projected.dtype),
            0.2 * jax.random.normal(keys[1], q_norm.shape),
            0.2 * jax.random.normal(keys[2], k_norm.shape),
            jnp.cos(angles).astype(jnp.bfloat16),
            jnp.sin(angles).astype(jnp.bfloat16),
            jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), pool),
            (own[row // each] if self.slots else own[0]).astype(table.dtype),
            positions.astype(jnp.int32),
        ]

    def reference(self, *arguments: Any) -> tuple[jax.Array, KVPages]:
        """The result in plain jnp."""
        return reference.attention_inputs(*arguments, format=self.format, eps=EPS)

    @property
    def ideal_bytes(self) -> int:
        """q, k and v read once, q, codes and scales written once, and what turns, scales and places them."""
        heads = self.query_heads + 2 * self.kv_heads
        read = self.tokens * self.itemsize * (heads * self.dims + 2 * self.half) + 2 * 4 * self.dims + 2 * 4 * self.tokens
        return read + self.tokens * 4 * self.query_heads * self.dims + self.written_bytes

    @property
    def weight_bytes(self) -> int:
        """There are no weights: instructions are counted against all bytes."""
        return self.ideal_bytes

    @property
    def written_bytes(self) -> int:
        """Codes and scales of all tokens."""
        vector = sum(kv_codecs.bytes_per_vector(self.format, part, self.dims) for part in ("k", "v"))
        return self.tokens * self.kv_heads * vector

    def moved_bytes(self, report: Any) -> int:
        """Everything the report counts, less the parts of arguments that no row touches."""
        *_, pool, table, _ = self.arguments()
        gates = self.itemsize * self.tokens * self.query_heads * self.dims
        tables = 4 * (math.prod(table.shape) - self.tokens)
        both_pools = 2 * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
        return rows.moved_bytes(report) - gates - tables - both_pools + self.written_bytes

    def tensor_ops(self) -> int:
        """None: nothing is multiplied by a matrix."""
        return 0


class OnACpu(OnCpu, Case):
    def run(self, *arguments: Any) -> tuple[jax.Array, KVPages]:
        return cpu.attention_inputs(*arguments, format=self.format, eps=EPS)


CASES = (
    Case("decode.rk4v4-e8", "rk4v4-e8"),
    Case("decode.rk4v4", "rk4v4"),
    Case("decode.rk8v4", "rk8v4"),
    Case("decode.int8", "int8"),
    Case("decode.bf16", "bf16"),
    Case("prefill.rk4v4-e8", "rk4v4-e8", tokens=1024, slots=0),
)
# Twins a CPU interprets in a moment: tails, two heads to a group, every format.
SMALL = tuple(
    dataclasses.replace(
        case,
        name=case.name + ".small",
        tokens=7 if case.slots else 70,
        slots=min(case.slots, 2),
        query_heads=4,
        kv_heads=2,
        dims=128,
        half=16,
        pages_per_slot=5,
    )
    for case in (*CASES, Case("decode.f32", "f32"))
)
# A context of 4,096 tokens; all slots' rows of a round, and one row.
ON_CPU = (
    *(OnACpu(f"cpu.{format}", format, pages_per_slot=64) for format in kv_codecs.FORMATS),
    OnACpu("cpu.f32.1row", "f32", tokens=1, slots=1, pages_per_slot=64),
)
