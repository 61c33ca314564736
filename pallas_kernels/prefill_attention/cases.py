"""Prefill chunks of the 27B: 24 query heads, 4 KV heads, head_dim 256, at several depths of the context."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import kv_codecs
from pallas_kernels.kv_pages import PAGE, append, pages_struct
from pallas_kernels.prefill_attention import kernel, pages, reference

HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `prefill_attention`: a chunk of `tokens`, `count` of them valid, that fills the pages up to `filled`."""

    name: str
    format: str
    filled: int
    tokens: int = 1024
    count: int = 1024
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM

    op = "prefill_attention"

    @property
    def start(self) -> int:
        """Position of the chunk's first token."""
        return self.filled - self.count

    @property
    def pages(self) -> int:
        """Pages of the slot that are filled, or begun."""
        return -(-self.filled // PAGE)

    @property
    def dtype(self) -> Any:
        """Type of the projections and the result."""
        return jnp.float32 if self.format == "f32" else jnp.bfloat16

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        return [
            struct((self.tokens, self.heads, self.head_dim), jnp.float32),
            struct((self.tokens, 2 * (self.heads + self.kv_heads) * self.head_dim), self.dtype),
            pages_struct(self.format, self.pages + 1, self.kv_heads, self.head_dim),
            struct((self.pages,), jnp.int32),
            struct((), jnp.int32),
            struct((), jnp.int32),
        ]

    def call(self, *arguments: Any, interpret: bool = False) -> jax.Array:
        """Packing the queries, and the kernel."""
        return kernel.prefill_attention(*arguments, format=self.format, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`: keys, values and scores of about 1, pages in any order."""
        q, projected, pool, _, _, _ = self.arguments()
        keys = jax.random.split(key, 5)
        vectors = (self.filled, self.kv_heads, self.head_dim)
        k, v = (jax.random.normal(i, vectors) for i in keys[:2])
        table = 1 + jax.random.permutation(keys[2], self.pages).astype(jnp.int32)
        pool = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), pool)
        fill = jax.jit(functools.partial(append, format=self.format), donate_argnums=0)
        return [
            jax.random.normal(keys[3], q.shape) / self.head_dim**0.5,
            jax.random.normal(keys[4], projected.shape, projected.dtype),
            fill(pool, k, v, table, jnp.arange(self.filled)),
            table,
            jnp.int32(self.start),
            jnp.int32(self.count),
        ]

    def reference(self, *arguments: Any) -> jax.Array:
        """The result in plain jnp, with the kernel's zeros for rows that are not valid."""
        valid = jnp.arange(self.tokens)[:, None] < self.count
        return jnp.where(valid, reference.prefill_attention(*arguments, format=self.format), 0)

    @property
    def allowed_error(self) -> float:
        """Largest relative error against `reference`."""
        # Of bf16, 2.8e-3 are the roundings of result, gate and product; the reference's gate is rounded more often.
        return 1e-5 if self.format == "f32" else 4.5e-3

    @property
    def weight_bytes(self) -> int:
        """Codes and scales of the filled pages, each page once."""
        vector = sum(kv_codecs.bytes_per_vector(self.format, part, self.head_dim) for part in ("k", "v"))
        return self.pages * PAGE * self.kv_heads * vector

    @property
    def ideal_bytes(self) -> int:
        """The filled pages and their numbers, q, gates and the result, each once."""
        size = jnp.dtype(self.dtype).itemsize
        return self.weight_bytes + 4 * self.pages + 8 + self.tokens * self.heads * self.head_dim * (4 + 2 * size)

    @property
    def shape(self) -> kernel.Shape:
        """The static facts of the kernel with its default blocks."""
        return kernel.Shape(
            self.tokens,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.pages,
            self.format,
            kernel.default_config(self.format),
            False,
        )

    def moved_bytes(self, report: Any) -> int:
        """Bytes that are touched of the arguments, and the packed queries written and read. Tiles re-read pages from L2."""
        return self.ideal_bytes + 2 * report.temporary_bytes

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the causal walk: a tile takes every block of keys that its last row sees, whole."""
        shape = self.shape
        rows, keys = shape.config.rows, shape.config.keys
        blocks = 0
        for tile in range(shape.tiles):
            first, last = tile * rows // shape.group, min((tile * rows + rows - 1) // shape.group, self.count - 1)
            blocks += (self.start + last) // keys + 1 if first < self.count else 0
        return blocks * self.kv_heads * rows * keys * 2 * self.head_dim

    def tensor_ops(self) -> int:
        """Warp-wide m16n8k16 instructions: the walk, and turning each tile's result back in two halves of its bits."""
        if self.format == "f32":
            return 0
        rows = self.shape.tiles * self.shape.config.rows
        turned = rows * self.kv_heads * self.head_dim * pages.SEGMENT * 2
        return (self.multiply_adds + turned) // 2048


LONG, CONTEXT = 32768, 262144
CASES = (
    Case("rk4v4-e8.first", "rk4v4-e8", filled=1024),
    Case("rk4v4-e8", "rk4v4-e8", filled=LONG),
    Case("rk4v4-e8.full", "rk4v4-e8", filled=CONTEXT),
    Case("rk4v4", "rk4v4", filled=LONG),
    Case("rk8v4", "rk8v4", filled=LONG),
    Case("int8", "int8", filled=LONG),
    Case("bf16", "bf16", filled=LONG),
)
# Twins a CPU interprets in a moment: no size is a multiple of a block, and some rows are not valid.
SMALL = tuple(
    dataclasses.replace(
        case,
        name=case.name + ".small",
        filled=45 if case.filled == 1024 else 173,
        tokens=50,
        count=45,
        heads=12,
        kv_heads=2,
        head_dim=128,
    )
    for case in (*(c for c in CASES if c.filled < CONTEXT), Case("f32", "f32", filled=LONG))
)
