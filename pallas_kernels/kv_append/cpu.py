"""Attention's inputs on a CPU in one call: queries normed, turned and rotated; keys and values encoded into their pages.

A vector of `head_dim` numbers passes through a buffer on the stack. Sums of squares are 16 chains over the dims, then
halves; everything else acts on elements alone, or pairs of them, so a vector's bits are its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.kv_codecs import uses_rotation
from pallas_kernels.kv_pages import PAGE, KVPages, pages_struct

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Code, Value, View

LANES = 16
_VECTORS = 32  # of a part, at least: fewer are not worth another thread's attention
_PARTS = 64


def attention_inputs(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    *,
    format: str,
    eps: float,
) -> tuple[jax.Array, KVPages]:
    """`kv_append.attention_inputs` on a CPU; its checks are relied on."""
    leaves, tree = jax.tree.flatten(pool)
    pages, kv_heads = leaves[0].shape[:2]
    tokens, half = cos.shape
    dims = q_norm.shape[0]
    dtypes = tuple(jnp.dtype(a.dtype).name for a in (projected, cos))
    query_heads = projected.shape[1] // (2 * dims) - kv_heads
    shape = _Shape(tokens, query_heads, kv_heads, dims, half, pages, table.shape[-1], table.ndim == 1, format, eps, dtypes)
    q, *leaves = _kernel(shape)(projected, q_norm, k_norm, cos, sin, table, positions, *leaves)
    return q, jax.tree.unflatten(tree, leaves)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """half: rotary pairs; pages: of the pool; per_slot: of a table's row; shared: whether there is one row for all tokens."""

    tokens: int
    query_heads: int
    kv_heads: int
    dims: int
    half: int
    pages: int
    per_slot: int
    shared: bool
    format: str
    eps: float
    dtypes: tuple[str, ...]  # of projected, of cos and sin

    @property
    def vectors(self) -> int:
        return self.tokens * (self.query_heads + 2 * self.kv_heads)

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the kernel's arguments, all but the pool's leaves."""
        shapes = [
            ((self.tokens, 2 * (self.query_heads + self.kv_heads) * self.dims), self.dtypes[0]),
            *(((self.dims,), "float32"),) * 2,
            *(((self.tokens, self.half), self.dtypes[1]),) * 2,
            ((self.per_slot,) if self.shared else (self.tokens, self.per_slot), "int32"),
            ((self.tokens,), "int32"),
        ]
        return [jax.ShapeDtypeStruct(*s) for s in shapes]


@functools.cache
def _kernel(shape: _Shape) -> cpu.Kernel:
    arguments = shape.arguments
    leaves = jax.tree.leaves(pages_struct(shape.format, shape.pages, shape.kv_heads, shape.dims))
    q = jax.ShapeDtypeStruct((shape.tokens, shape.query_heads, shape.dims), "float32")
    parts = min(_PARTS, -(-shape.vectors // _VECTORS))

    def build(c: Code, *views: View) -> None:
        from pallas_kernels.kv_codecs.cpu import Part

        inputs = views[: len(arguments)]
        q, *pool = views[len(arguments) + len(leaves) :]  # what changes in place is the results' memory
        cut = len(pool) // 2
        k, v = (Part(c, shape.format, name, own) for name, own in (("k", pool[:cut]), ("v", pool[cut:])))
        _Tokens(c, shape, *inputs, parts=parts).run(q, k, v)

    return cpu.kernel(
        f"kv_append_{shape.format}",
        build,
        [*arguments, *leaves],
        [q, *leaves],
        parts=parts,
        aliases={len(arguments) + i: 1 + i for i in range(len(leaves))},
    )


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """This part's share of the queries, of the keys and of the values of all tokens."""

    c: Code
    shape: _Shape
    projected: View
    q_norm: View
    k_norm: View
    cos: View
    sin: View
    table: View
    positions: View
    parts: int

    def run(self, q: View, k, v) -> None:
        from pallas_kernels.kv_codecs.cpu import rotate

        c, shape = self.c, self.shape
        x = c.stack((shape.dims,), "float32")

        def query(token: Value, head: Value) -> None:
            self._normed(x, token, head * (2 * shape.dims), self.q_norm)
            self._turned(x, token)
            self._each(x, lambda value: value * shape.dims**-0.5)
            if uses_rotation(shape.format):
                rotate(c, x)
            c.loop(0, shape.dims, [], lambda i: q.store(x.load(i, lanes=LANES), token, head, i), step=LANES)

        def key(token: Value, head: Value) -> None:
            self._normed(x, token, (head + 2 * shape.query_heads) * shape.dims, self.k_norm)
            self._turned(x, token)
            put(k, token, head)

        def value(token: Value, head: Value) -> None:
            start = (head + 2 * shape.query_heads + shape.kv_heads) * shape.dims
            c.loop(0, shape.dims, [], lambda i: x.store(self.projected.load(token, start + i, lanes=LANES), i), step=LANES)
            put(v, token, head)

        def put(part, token: Value, head: Value) -> None:
            if uses_rotation(shape.format):
                rotate(c, x)
            page, row = self._place(token)
            part.store(x, page, head, row)

        for heads, body in ((shape.query_heads, query), (shape.kv_heads, key), (shape.kv_heads, value)):
            first, last = c.share(shape.tokens * heads, self.parts)
            c.loop(first, last, [], lambda i, body=body, heads=heads: body(i // heads, i % heads))

    def _normed(self, x: View, token: Value, start: Value, weight: View) -> None:
        """x / sqrt(mean x^2 + eps) (1 + weight), rounded as projected is."""
        c, dims = self.c, self.shape.dims

        def square(i: Value, total: Value) -> list[Value]:
            value = self.projected.load(token, start + i, lanes=LANES)
            return [c.fma(value, value, total)]

        factor = c.rsqrt(c.loop(0, dims, c.zeros(1), square, step=LANES)[0].sum() / dims + self.shape.eps)

        def scale(i: Value) -> None:
            value = self.projected.load(token, start + i, lanes=LANES) * factor
            x.store(self._rounded(value * (1.0 + weight.load(i, lanes=LANES))), i)

        c.loop(0, dims, [], scale, step=LANES)

    def _turned(self, x: View, token: Value) -> None:
        """Rotary embedding: pairs (i, i + half) of the leading dims, rounded once."""
        c, half = self.c, self.shape.half
        lanes = next(n for n in (16, 8, 4, 2, 1) if half % n == 0)

        def pairs(i: Value) -> None:
            cos, sin = (a.load(token, i, lanes=lanes) for a in (self.cos, self.sin))
            a, b = x.load(i, lanes=lanes), x.load(i + half, lanes=lanes)
            x.store(self._rounded(c.fma(a, cos, -(b * sin))), i)
            x.store(self._rounded(c.fma(b, cos, a * sin)), i + half)

        c.loop(0, half, [], pairs, step=lanes)

    def _each(self, x: View, change: Callable[[Value], Value]) -> None:
        self.c.loop(0, self.shape.dims, [], lambda i: x.store(change(x.load(i, lanes=LANES)), i), step=LANES)

    def _place(self, token: Value) -> tuple[Value, Value]:
        """Page and row; page 0, which nobody reads, for positions outside the slot's table."""
        c, shape = self.c, self.shape
        position = self.positions.integer(token)
        none = c.value(0)
        inside = c.select(position < 0, none, c.select(position < shape.per_slot * PAGE, c.value(1), none))
        position = position * inside
        own = (position // PAGE,) if shape.shared else (token, position // PAGE)
        return self.table.integer(*own) * inside, position % PAGE

    def _rounded(self, x: Value) -> Value:
        return self.c.round_bf16(x) if self.shape.dtypes[0] == "bfloat16" else x
