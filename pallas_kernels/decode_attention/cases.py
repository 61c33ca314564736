"""Decode and verify rows of the 27B: 24 query heads, 4 KV heads, head_dim 256, up to 262,144 tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import kv_codecs
from pallas_kernels.decode_attention import cpu, kernel, reference, tiles
from pallas_kernels.kv_pages import PAGE, pages_struct
from pallas_kernels.lab.on_cpu import OnCpu

HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
CONTEXT = 262144


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `decode_attention`: `rows` rows at the end of each of `filled`; a pool of `pool_tokens` and page 0."""

    name: str
    format: str
    rows: int = 4
    filled: tuple[int, ...] = (CONTEXT,)
    pool_tokens: int = CONTEXT
    table_pages: int = CONTEXT // PAGE
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    config: kernel.Config | None = None

    op = "decode_attention"

    @property
    def slots(self) -> int:
        """Slots of the call, empty ones included."""
        return len(self.filled)

    @property
    def dtype(self) -> Any:
        """Type of the projections and the result."""
        return jnp.float32 if self.format == "f32" else jnp.bfloat16

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        return [
            struct((self.slots, self.rows, self.heads, HEAD_DIM), jnp.float32),
            struct((self.slots * self.rows, 2 * (self.heads + self.kv_heads) * HEAD_DIM), self.dtype),
            pages_struct(self.format, self.pool_tokens // PAGE + 1, self.kv_heads, HEAD_DIM),
            struct((self.slots, self.table_pages), jnp.int32),
            struct((self.slots, self.rows), jnp.int32),
            struct((self.slots,), jnp.int32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> jax.Array:
        """Both launches."""
        return kernel.decode_attention(*arguments, format=self.format, config=self.config, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`: values of about 1 in pages that each slot finds in random order."""
        q, projected, pool, table, positions, _ = self.arguments()
        keys = jax.random.split(key, 4)
        leaves, tree = jax.tree.flatten(pool)
        pool = tree.unflatten([_random(k, leaf) for k, leaf in zip(jax.random.split(keys[2], len(leaves)), leaves, strict=True)])
        order = 1 + jax.random.permutation(keys[3], self.pool_tokens // PAGE)
        own, at = [], 0
        for count in self.filled:
            pages = -(-count // PAGE)
            own.append(jnp.pad(order[at : at + pages], (0, self.table_pages - pages)))
            at += pages
        filled = jnp.asarray(self.filled, jnp.int32)
        return [
            jax.random.normal(keys[0], q.shape) * 2 / HEAD_DIM**0.5,
            jax.random.normal(keys[1], projected.shape, projected.dtype),
            pool,
            jnp.stack(own).astype(table.dtype),
            (filled[:, None] - self.rows + jnp.arange(self.rows)).astype(positions.dtype),
            filled,
        ]

    def reference(self, *arguments: Any) -> jax.Array:
        """The result in plain jnp."""
        return reference.decode_attention(*arguments, format=self.format)

    @property
    def allowed_error(self) -> float:
        """Largest relative error against `reference`."""
        # Of bf16, 2.8e-3 are the roundings of result, gate and product; the reference's gate is rounded more often.
        return 1e-5 if self.format == "f32" else 4.5e-3

    @property
    def pages_walked(self) -> int:
        """Pages read, of all slots."""
        return sum(-(-count // PAGE) for count in self.filled)

    @property
    def weight_bytes(self) -> int:
        """Codes and scales of the filled pages."""
        vector = sum(kv_codecs.bytes_per_vector(self.format, part, HEAD_DIM) for part in ("k", "v"))
        return self.pages_walked * PAGE * self.kv_heads * vector

    @property
    def ideal_bytes(self) -> int:
        """The filled pages and their numbers, q, gates and the result, each once."""
        return self.weight_bytes + 4 * self.pages_walked + self._row_bytes + 4 * self.slots * (self.rows + 1)

    @property
    def _row_bytes(self) -> int:
        size = jnp.dtype(self.dtype).itemsize
        return self.slots * self.rows * self.heads * HEAD_DIM * (4 + 2 * size)

    def moved_bytes(self, report: Any) -> int:
        """Bytes that are touched of the arguments, and the splits' sums written and read. Blocks re-read q from L2."""
        scratch = report.temporary_bytes
        return self.ideal_bytes + 2 * scratch

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of tensor cores, whole instructions counted."""
        return 2048 * self.tensor_ops()

    def tensor_ops(self) -> int:
        """Warp-wide m16n8k16 instructions. Steps of less than a page leave some warps the same scores."""
        if self.format == "f32":
            return 0
        shape = kernel.SplitShape(self.format, self.rows, self.heads // self.kv_heads, 1, False)
        columns = sum(kernel.column_widths(shape.columns))
        each_step = (PAGE * tiles.query_parts(self.format) + shape.tokens) * HEAD_DIM * columns // 2048
        return self.pages_walked * self.kv_heads * (PAGE // shape.tokens) * each_step


class OnACpu(OnCpu, Case):
    dtype = jnp.float32

    @property
    def allowed_error(self) -> float:
        """Largest relative error against `reference`."""
        return 1e-5

    def run(self, *arguments: Any) -> jax.Array:
        return cpu.decode_attention(*arguments, format=self.format)


def _random(key: jax.Array, leaf: Any) -> jax.Array:
    """Stored numbers whose values are about 1."""
    if leaf.dtype == jnp.uint8:  # a 4-bit scale of either sign, 0.125 to 0.23
        byte = jax.random.randint(key, leaf.shape, 0, 16)
        return ((byte & 8) * 16 + 56 + byte % 8).astype(leaf.dtype)
    if leaf.dtype == jnp.uint32:
        return jax.random.bits(key, leaf.shape, leaf.dtype)
    if leaf.dtype == jnp.int8:
        return jax.random.randint(key, leaf.shape, -127, 128).astype(leaf.dtype)
    if leaf.dtype == jnp.float16:
        return jax.random.uniform(key, leaf.shape, leaf.dtype, 0.005, 0.02)
    values = jax.random.normal(key, leaf.shape)
    return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), leaf.dtype) if leaf.dtype == jnp.uint16 else values


# Four slots share the tokens that fit beside the 27B on 24 GB, one of them at full length.
SHARED = (CONTEXT, 65536, 16384, 16384)
CASES = (
    Case("rk4v4-e8", "rk4v4-e8"),
    Case("rk4v4", "rk4v4"),
    Case("int8", "int8"),
    Case("rk8v4", "rk8v4"),
    Case("bf16", "bf16"),
    Case("rk4v4-e8.4slots", "rk4v4-e8", filled=SHARED, pool_tokens=sum(SHARED)),
    Case("rk4v4-e8.1row", "rk4v4-e8", rows=1),
    Case("rk4v4-e8.6rows", "rk4v4-e8", rows=6),
)
# Twins a CPU interprets in a moment: an empty slot, one page begun, more pages than splits, fewer than splits.
SMALL = tuple(
    dataclasses.replace(
        case,
        name=case.name + ".small",
        filled=(333, 0, 9, 64) if case.slots == 4 else (333,),
        pool_tokens=8 * PAGE,
        table_pages=7,
        heads=12,
        kv_heads=2,
        config=kernel.Config(splits=3),
    )
    for case in (*CASES, Case("f32", "f32"))
)


def _on_cpu(name: str, format: str, rows: int, filled: int) -> OnACpu:
    return OnACpu(f"cpu.{name}", format, rows, (filled,), filled, filled // PAGE)


# One row over 8,192 tokens in every format; four rows; shorter contexts.
ON_CPU = (
    *(_on_cpu(format, format, 1, 8192) for format in kv_codecs.FORMATS),
    _on_cpu("f32.4rows", "f32", 4, 8192),
    _on_cpu("rk4v4-e8.4rows", "rk4v4-e8", 4, 8192),
    _on_cpu("f32.2048", "f32", 1, 2048),
    _on_cpu("rk4v4-e8.2048", "rk4v4-e8", 1, 2048),
    _on_cpu("f32.short", "f32", 1, 512),
)
