"""Attention of a prefill chunk over a slot's packed pages: flash attention on tensor cores (Dao et al. 2022).

A block owns 64 rows, a row being one query head of one token; rows run over a token's query heads first, so 64 of them
are about 11 tokens of one KV head. It unpacks each page once for all its rows and walks only the pages that its last
row sees. A page's values go from registers to shared memory as bf16, 64 dims at a time, and from there to tensor cores.

A row's arithmetic never involves another row or the chunk's start: pages are walked from the first one on, and a page that
lies beyond a row leaves its sums as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kv_codecs.formats import layout_of
from pallas_kernels.kv_pages import NEVER, PAGE, KVPages
from pallas_kernels.prefill_attention import pages
from pallas_kernels.prefill_attention.pages import SEGMENT

_LOG2E = 1.4426950408889634
PART = 16  # dims of the epilogue at a time: they have to fit beside the sums


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows a block computes, tokens of a page it takes at a time, warps a block, depth of the loads running ahead."""

    rows: int = 64
    keys: int = 32
    warps: int = 4
    stages: int = 1


def default_config(format: str) -> Config:
    """Tiles without spills on sm_89 in both supported versions of JAX: 16 rows a warp leave half its registers for sums.

    Two blocks fit on an SM, so that one unpacks while the other multiplies. float32 pages are multiplied without tensor
    cores, in small tiles.
    """
    if format == "f32":
        return Config(rows=16, keys=16)
    # The scales of 8-bit codes need registers of their own.
    return {"int8": Config(keys=16, stages=2), "rk8v4": Config(keys=16)}.get(format, Config())


@functools.partial(jax.jit, static_argnames=("format", "config", "interpret"))
def prefill_attention(
    q: jax.Array,
    projected: jax.Array,
    pool: KVPages,
    table: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    format: str,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Gated attention of a chunk's rows over the slot's pages, `[tokens, Hq * D]` in projected's dtype.

    q: float32 `[tokens, Hq, D]`, normed, turned, scaled and in the stored basis, see `kv_append.attention_inputs`.
    projected: `[tokens, (2 Hq + 2 Hkv) D]`; only the gate columns are read.
    table: int32 `[pages_per_slot]`; start, count: int32 scalars. Token i stands at position start + i and sees
    0..start + i; the first `count` are valid, the others give zeros. Pages hold start + count tokens.
    """
    tokens, query_heads, head_dim = q.shape
    kv_heads = pool.k.codes.shape[1]
    config = config or default_config(format)
    shape = Shape(tokens, query_heads, kv_heads, head_dim, table.shape[0], format, config, interpret)
    out = jax.ShapeDtypeStruct((tokens, query_heads * head_dim), projected.dtype)
    operands = [_pack_queries(q, shape), projected, table, jnp.reshape(start, (1,)), jnp.reshape(count, (1,))]
    operands += [a for part in pool for a in (part.codes, part.scales) if a is not None]
    operands += [jnp.asarray(pages.inverse_rotation() if shape.rotated else np.eye(SEGMENT), jnp.bfloat16)]
    return launch.launch(
        functools.partial(_kernel, shape=shape),
        name=f"prefill_attention_{format.replace('-', '_')}",
        # Row tiles run fastest: blocks in flight share a KV head's pages in L2.
        grid=(shape.tiles, kv_heads),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=launch.whole(out),
        out_shape=out,
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
    )(*operands)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts the kernel body needs."""

    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    table: int
    format: str
    config: Config
    interpret: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def tiles(self) -> int:
        """Blocks along the rows, which are (token, query head) pairs of a KV head."""
        return -(-self.tokens * self.group // self.config.rows)

    @property
    def segments(self) -> range:
        """The stretches of 64 dims of a head."""
        return range(self.head_dim // SEGMENT)

    @property
    def rotated(self) -> bool:
        """Whether values are stored rotated."""
        return layout_of(self.format, "v").rotated

    def kind(self, part: str) -> str:
        """Kind of code of "k" or "v", as in `kv_codecs.formats`."""
        return layout_of(self.format, part).kind


def _pack_queries(q: jax.Array, shape: Shape) -> jax.Array:
    """Queries `[Hkv, rows of all tiles, D]` in units of log2(e), in the type and order of the keys."""
    q = q * _LOG2E
    if shape.format != "f32":
        q = q.astype(jnp.bfloat16)
    if shape.kind("k") in ("int4", "e8"):
        q = pages.to_stored_order(q)
    rows = shape.tokens * shape.group
    q = q.reshape(shape.tokens, shape.kv_heads, shape.group, shape.head_dim).transpose(1, 0, 2, 3)
    q = q.reshape(shape.kv_heads, rows, shape.head_dim)
    return jnp.pad(q, ((0, 0), (0, shape.tiles * shape.config.rows - rows), (0, 0)))


def _kernel(q_ref: Any, projected_ref: Any, table_ref: Any, start_ref: Any, count_ref: Any, *refs: Any, shape: Shape) -> None:
    """The result of one tile of rows of one KV head."""
    *pool, turn_ref, o_ref = refs
    scaled = [shape.kind(part) != "float" for part in "kv"]
    k_refs = (pool.pop(0), pool.pop(0) if scaled[0] else None)
    v_refs = (pool.pop(0), pool.pop(0) if scaled[1] else None)
    rows, group = shape.config.rows, shape.group
    # The last rows see most, so they start first.
    first_row = (shape.tiles - 1 - pl.program_id(0)) * rows
    head = pl.program_id(1)
    start, count = launch.load(start_ref, 0), launch.load(count_ref, 0)
    # Tokens of the tile's first and last valid row, and the blocks of keys that the last one sees; none for padding alone.
    first, last = _div(first_row, group), jnp.minimum(_div(first_row + rows - 1, group), count - 1)
    keys, blocks = shape.config.keys, PAGE // shape.config.keys
    seen = jnp.minimum(_div(start + last, keys) + 1, shape.table * blocks)
    seen = jnp.where(first < count, seen, 0)

    walk = functools.partial(_step, shape, q_ref, table_ref, k_refs, v_refs, head, first_row, start, last)
    carry = (
        jnp.full((rows,), NEVER, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, SEGMENT), jnp.float32) for _ in shape.segments),
        # This stays 0, which the compiler cannot know: rows' numbers are worked out where needed, not kept in registers.
        jnp.int32(0),
    )
    _, total, sums, nothing = jax.lax.fori_loop(0, seen, walk, carry)
    # The quotient, back in the model's basis, gated and stored, a few dims at a time: sums leave no registers for more.
    inverse = _inverse(jnp.where(total > 0, total, 1.0), shape.interpret)
    block = _Block(shape, first_row + nothing, head, count)
    for g, values in zip(shape.segments, sums, strict=True):
        values = values * inverse[:, None]
        if shape.format == "f32":
            block.store(projected_ref, o_ref, g * SEGMENT, values)
            continue
        for at in range(0, SEGMENT, PART):
            block.store(projected_ref, o_ref, g * SEGMENT + at, _turn(values, turn_ref, at))


class _Block:
    """Token, query head and validity of each row of a block, `[rows]`: where it lives in the arrays by token."""

    def __init__(self, shape: Shape, first_row: Any, kv_head: Any, count: Any) -> None:
        self.shape = shape
        self.token = _row_token(shape, first_row)
        self.head = (kv_head - self.token) * shape.group + first_row + jnp.arange(shape.config.rows, dtype=jnp.int32)
        self.valid = self.token < jnp.minimum(count, shape.tokens)

    def store(self, projected_ref: Any, o_ref: Any, at: int, values: jax.Array) -> None:
        """Dims from `at` on of the rows' heads: `values` times the sigmoid of their gates, each rounded to the output's type."""
        size, dim, dtype = values.shape, self.shape.head_dim, o_ref.dtype
        column = at + jax.lax.broadcasted_iota(jnp.int32, size, 1)
        token, head, valid = (jnp.broadcast_to(a[:, None], size) for a in (self.token, self.head, self.valid))
        gate = launch.load(projected_ref, (token, (2 * head + 1) * dim + column), valid).astype(jnp.float32)
        gate = _sigmoid(gate, self.shape.interpret).astype(dtype).astype(jnp.float32)
        values = jnp.where(valid, values.astype(dtype).astype(jnp.float32) * gate, 0.0)
        launch.store(o_ref, (token, head * dim + column), values, token < self.shape.tokens)


def _row_token(shape: Shape, first_row: Any) -> jax.Array:
    """The token of each row of a block, `[rows]`."""
    return _div(first_row + jax.lax.broadcasted_iota(jnp.int32, (shape.config.rows,), 0), shape.group)


def _step(
    shape: Shape,
    q_ref: Any,
    table_ref: Any,
    k_refs: tuple[Any, Any],
    v_refs: tuple[Any, Any],
    head: Any,
    first_row: Any,
    start: Any,
    last: Any,
    i: Any,
    carry: tuple,
) -> tuple:
    """One block of keys: scores, running maximum and sum, and values added to the sums of each segment."""
    # The page of this block of keys, and its tokens there and in the slot.
    top, total, sums, nothing = carry
    keys = shape.config.keys
    blocks = PAGE // keys
    page = launch.load(table_ref, _div(i, blocks))
    tokens = pl.ds(pl.multiple_of((i - _div(i, blocks) * blocks) * keys, keys), keys)
    token = i * keys + jax.lax.broadcasted_iota(jnp.int32, (keys,), 0)
    inside = token <= start + last
    exact = shape.format == "f32"

    # Scores q K^T, 64 dims at a time, so that only one unpacked segment is alive.
    scores = jnp.zeros((shape.config.rows, keys), jnp.float32)
    for g in shape.segments:
        k, scale = pages.segment(shape.kind("k"), *k_refs, page, head, g, tokens, None, shape.interpret)
        # Loaded in here, queries stay in shared memory; loaded before the loop, they would take registers the sums need.
        q = launch.load(q_ref, (head, pl.ds(first_row, shape.config.rows), pl.ds(g * SEGMENT, SEGMENT)))
        product = launch.dot(q, k.T, exact=exact)
        scores += product if scale is None else product * scale[None]
    # Masked everywhere: it is one instruction in twenty, and a second loop without it takes registers the sums need.
    position = start + jnp.minimum(_row_token(shape, first_row + nothing), last)
    visible = jnp.broadcast_to(token[None], scores.shape) <= jnp.broadcast_to(position[:, None], scores.shape)
    scores = jnp.where(visible, scores, NEVER)
    # Weights under the new maximum; what was summed so far shrinks to it. Masked scores give weight 0: each row sees token 0
    # in its first block.
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    p = _exp2(scores - new_top[:, None], shape.interpret)
    shrink = _exp2(top - new_top, shape.interpret)
    total = total * shrink + jnp.sum(p, axis=1)
    # Sums p V, a segment of dims at a time; a token's int8 scale goes to its weight.
    new_sums = []
    for g, values in zip(shape.segments, sums, strict=True):
        v, scale = pages.segment(shape.kind("v"), *v_refs, page, head, g, tokens, inside, shape.interpret)
        weights = (p if scale is None else p * scale[None]).astype(v.dtype)
        new_sums.append(values * shrink[:, None] + launch.dot(weights, v, exact=exact))
    # Page numbers are never negative, so this adds 0.
    return new_top, total, tuple(new_sums), nothing + jnp.minimum(page, 0)


def _exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2^x for x <= 0 in one instruction; results below 2^-126 become 0."""
    return launch.packed("ex2.approx.ftz.f32 $0, $1;", jnp.exp2, x, dtype=jnp.float32, interpret=interpret, pack=1)


def _inverse(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / x to a last bit or so; a division would be a call, and take the registers of one."""
    return launch.packed("rcp.approx.ftz.f32 $0, $1;", lambda x: 1 / x, x, dtype=jnp.float32, interpret=interpret, pack=1)


def _sigmoid(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / (1 + 2^(-x log2(e))), as `_inverse`."""
    asm = "{ .reg .b32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;rcp.approx.ftz.f32 $0, t; }"
    return launch.packed(asm, jax.nn.sigmoid, x, dtype=jnp.float32, interpret=interpret, pack=1)


def _turn(values: jax.Array, turn_ref: Any, at: int) -> jax.Array:
    """Dims `at : at + PART` of float32 `[rows, 64]` times the matrix in `turn_ref`, to 16 significant bits."""
    turn = launch.load(turn_ref, (pl.ds(0, SEGMENT), pl.ds(at, PART)))
    high = values.astype(jnp.bfloat16)
    low = (values - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return launch.dot(high, turn) + launch.dot(low, turn)


def _div(a: Any, b: int) -> Any:
    """a / b for a >= 0: `//` would look after signs."""
    return jax.lax.div(a, jnp.int32(b)) if b > 1 else a
