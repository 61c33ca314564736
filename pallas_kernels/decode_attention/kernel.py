"""Decode and verify rows: every block walks some pages of one slot and KV head for all rows and query heads at once.

The columns of its products are (row, query head) pairs, eight at a time: 4 rows of 6 heads are 24 columns. A column's
arithmetic never involves another one, so a row's result has the same bits alone and beside five drafts. Split s of S
takes the pages s, s + S, ... of a slot (as many as are filled), so a row's order of summation follows from its position
alone: pages beyond it are masked, and a fully masked page changes no bit (factors 2^0, plus zeros).

Online softmax (Milakov & Gimelshein 2018; Dao et al. 2022) in base 2, log2(e) folded into q. Each split leaves float32
sums over its pages, which `merge` puts together (split-K decoding, Dao et al. 2023).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.decode_attention import tiles
from pallas_kernels.decode_attention.merge import merge
from pallas_kernels.kv_codecs import check_format, uses_rotation
from pallas_kernels.kv_pages import NEVER, PAGE, KVPages

MOST_COLUMNS = 40  # rows x query heads of a KV head that fit in a thread's registers
_WIDEST = 32
# Weights are taken times 2^14, in sums and totals alike: fp16 then holds them from 2^-38 of the largest on.
_LIFT = 14.0


@dataclasses.dataclass(frozen=True)
class Config:
    """splits: the blocks that share a slot and KV head; stages: depth of the loads running ahead."""

    splits: int = 64
    stages: int = 3


def default_config(slots: int, columns: int, format: str) -> Config:
    """Two blocks for each of 128 SMs when there is one slot; one, or nearly, when it is the only busy one of several.

    Each split writes its sums and `merge` reads them: more splits would be over 5% of the traffic of 262,144 tokens.
    Loads run one page ahead where shared memory holds two.
    """
    wide = columns > 24
    splits = (32 if wide else 64) if slots == 1 else 32 if slots == 2 else 24
    stages = 1 if format == "f32" else 2 if format == "bf16" and wide else 3
    return Config(splits, stages)


def column_widths(columns: int) -> list[int]:
    """Powers of two, the largest first, that hold `columns` in steps of 8: 24 -> [16, 8]."""
    left, widths = -(-columns // 8) * 8, []
    while left:
        widths.append(min(_WIDEST, 1 << (left.bit_length() - 1)))
        left -= widths[-1]
    return widths


def unfit(q_shape: tuple[int, ...], kv_heads: int, format: str) -> str:
    """Why the kernel cannot take q of this shape, or nothing."""
    _, rows, heads, head_dim = q_shape
    check_format(format, head_dim)
    if head_dim != tiles.HEAD_DIM:
        return f"q {q_shape}: head_dim {head_dim} must be {tiles.HEAD_DIM} for this kernel"
    if heads % kv_heads or rows * heads // kv_heads > MOST_COLUMNS:
        return f"q {q_shape}: rows x query heads must be a multiple of {kv_heads} KV heads and at most {MOST_COLUMNS} for each"
    return ""


@functools.partial(jax.jit, static_argnames=("format", "config", "interpret"))
def decode_attention(
    q: jax.Array,
    projected: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    filled: jax.Array,
    *,
    format: str,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The package's `decode_attention` in two launches; head_dim 256 and at most 40 rows x query heads per KV head, or
    ValueError."""
    slots, rows, heads, head_dim = q.shape
    kv_heads = pool.k.codes.shape[1]
    if reason := unfit(q.shape, kv_heads, format):
        raise ValueError(reason)
    columns = rows * heads // kv_heads
    config = config or default_config(slots, columns, format)
    lead = (slots, kv_heads, config.splits, columns)
    out = [
        jax.ShapeDtypeStruct((*lead, head_dim), jnp.float32),
        jax.ShapeDtypeStruct(lead, jnp.float32),
        jax.ShapeDtypeStruct(lead, jnp.float32),
    ]
    leaves = [pool.k.codes, pool.k.scales, pool.v.codes, pool.v.scales]
    operands = [a for a in (q, *leaves, table, positions, filled) if a is not None]
    shape = SplitShape(format, rows, heads // kv_heads, config.splits, interpret)
    partial = launch.launch(
        functools.partial(_split_kernel, shape=shape),
        name=f"decode_attention_{format.replace('-', '_')}",
        grid=(config.splits, kv_heads, slots),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=[launch.whole(o) for o in out],
        out_shape=out,
        num_warps=8 if format == "f32" else 4,
        num_stages=config.stages,
        interpret=interpret,
    )(*operands)
    sums, tops, totals = partial
    rotated = uses_rotation(format)
    return merge(sums, tops, totals, projected, filled, rows=rows, page=PAGE, rotated=rotated, interpret=interpret)


@dataclasses.dataclass(frozen=True)
class SplitShape:
    """The static facts a split needs: format, rows, query heads of a KV head, splits."""

    format: str
    rows: int
    group: int
    splits: int
    interpret: bool

    @property
    def columns(self) -> int:
        """(row, query head) pairs of a block."""
        return self.rows * self.group

    @property
    def tokens(self) -> int:
        """Tokens of one step: a page, or a part of one where two of them would not fit in shared memory."""
        return {"bf16": PAGE // 2, "f32": PAGE // 4}.get(self.format, PAGE)

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b with float32 sums; on tensor cores, but for float32 pages."""
        return launch.dot(a, b, exact=self.format == "f32")


def _split_kernel(q_ref: Any, *refs: Any, shape: SplitShape) -> None:
    """Sums, tops and totals of one split of one slot and KV head, for all rows and query heads that share it."""
    *leaves, table, positions, filled, sums_ref, tops_ref, totals_ref = refs
    k, ks, v, vs = leaves if len(leaves) == 4 else (leaves[0], None, leaves[1], None)
    split, head, slot = (pl.program_id(i) for i in range(3))
    count = launch.load(filled, (slot,))
    # Pages of this split, each walked in `parts` steps. A block without any writes nothing, and `merge` knows.
    mine = (-(-count // PAGE) - split + shape.splits - 1) // shape.splits
    parts = PAGE // shape.tokens

    @pl.when(mine > 0)
    def _() -> None:
        # The columns in blocks of tensor-core width, with their queries and the last token that each sees.
        at, blocks = 0, []
        for width in column_widths(shape.columns):
            blocks.append(_Columns(at + jnp.arange(width), shape))
            at += width
        queries = [b.queries(q_ref, slot, head) for b in blocks]
        last = [jnp.minimum(b.load(positions, slot), count - 1) for b in blocks]

        def place(i: Any) -> tuple[Any, Any]:
            """The page of step i within the slot, and the step's first token within the page."""
            turn, part = (i, 0) if parts == 1 else (jax.lax.div(i, parts), jax.lax.rem(i, parts))
            return split + turn * shape.splits, part * shape.tokens

        def page_of(i: Any) -> jax.Array:
            return launch.load(table, (slot, jnp.minimum(place(i)[0], table.shape[1] - 1)))

        def step(i: Any, carry: tuple) -> tuple:
            # The next page is looked up a step ahead: loads through a table entry would not run ahead otherwise.
            page, states = carry
            following = page_of(i + 1)
            # Where the step's tokens stand in the slot, and in the pool.
            turn, start = place(i)
            token = turn * PAGE + start + jnp.arange(shape.tokens)
            index = (page, head, start)
            # Scores K q. Codes are loaded once and unpacked for each block of columns, see `tiles._own`.
            stored = tiles.load_keys(k, ks, index, shape.format, shape.tokens)
            keys = [tiles.key_tiles(stored, shape.format, use, shape.interpret) for use in range(len(blocks))]
            scores = _scores(keys, queries, shape)
            # Weights under each column's new maximum, and the factor which that puts on its sums so far.
            softmax = [
                _online(s, token[:, None] <= end[None], *state[:2]) for s, end, state in zip(scores, last, states, strict=True)
            ]
            # Sums: V^T p is added, a tile of dims at a time.
            stored = tiles.load_values(v, vs, index, token < count, shape.format, shape.tokens)
            new = []
            for use, ((top, total, shrink, p), (_, _, sums)) in enumerate(zip(softmax, states, strict=True)):
                values = tiles.value_tiles(stored, shape.format, use, shape.interpret)
                p = p.astype(tiles.value_dtype(shape.format))
                new.append((top, total, tuple(s * shrink[None] + shape.dot(t, p) for s, t in zip(sums, values, strict=True))))
            return following, tuple(new)

        states = tuple(b.start(tiles.value_heights(shape.format)) for b in blocks)
        _, states = jax.lax.fori_loop(0, mine * parts, step, (page_of(jnp.int32(0)), states))
        # What `merge` needs of a split. Dims go from the order of their tiles to the natural one.
        for b, (top, total, sums) in zip(blocks, states, strict=True):
            lead = (slot, head, split)
            launch.store(tops_ref, (*lead, b.index), top, b.exists)
            launch.store(totals_ref, (*lead, b.index), jnp.sum(jnp.sum(total, axis=0), axis=0), b.exists)
            at = 0
            for part in sums:
                dims = tiles.value_dims(shape.format, at + jnp.arange(part.shape[0]))
                at += part.shape[0]
                launch.store(sums_ref, (*lead, b.index[None], dims[:, None]), part, b.mask(part.shape[0]))


class _Columns:
    """Some (row, query head) pairs of a block; those past the last belong to no row and are never stored."""

    def __init__(self, index: jax.Array, shape: SplitShape) -> None:
        self.index, self.shape = index, shape
        self.exists = index < shape.columns

    def mask(self, height: int) -> jax.Array:
        """bool `[height, columns]`: the columns that exist."""
        return jnp.broadcast_to(self.exists[None], (height, self.index.shape[0]))

    def load(self, positions: Any, slot: jax.Array) -> jax.Array:
        """The position of each column's row: it sees tokens up to that one, none at -1."""
        return launch.load(positions, (slot, self.index // self.shape.group), self.exists, -1)

    def queries(self, q_ref: Any, slot: jax.Array, head: jax.Array) -> list[jax.Array]:
        """`[dims, columns]` for each tile of keys, times log2(e)."""
        row, member = self.index // self.shape.group, self.index % self.shape.group
        heads = head * self.shape.group + member
        loaded = []
        for dims in tiles.key_order(self.shape.format):
            q = launch.load(q_ref, (slot, row[None], heads[None], dims[:, None]), self.mask(dims.shape[0]))
            loaded.append(tiles.query_tile(q * math.log2(math.e), self.shape.format))
        return loaded

    def start(self, heights: tuple[int, ...]) -> tuple:
        """Top `[columns]`, total `[tokens / 16, 8, columns]` and sums `[dims, columns]` before the first page."""
        columns = self.index.shape[0]
        return (
            jnp.full((columns,), NEVER, jnp.float32),
            jnp.zeros((self.shape.tokens // 16, 8, columns), jnp.float32),
            tuple(jnp.zeros((h, columns), jnp.float32) for h in heights),
        )


def _scores(keys: list[tiles.Keys], queries: list[list[jax.Array]], shape: SplitShape) -> list[jax.Array]:
    """`[tokens, columns]` for each block of columns. An unpacked tile serves all of them before the next is made."""
    parts = tiles.query_parts(shape.format)  # 2: a query's high and low half are columns of their own, added at the end
    scores = [jnp.zeros((shape.tokens, q[0].shape[1]), jnp.float32) for q in queries]
    for i in range(len(queries[0])):
        for n, (own, q) in enumerate(zip(keys, queries, strict=True)):
            product = shape.dot(own.tiles[i], q[i])
            scores[n] += product if own.scales is None else product * own.scales[i][:, None]
    return scores if parts == 1 else [jnp.sum(s.reshape(shape.tokens, -1, parts), axis=-1) for s in scores]


def _online(
    scores: jax.Array, visible: jax.Array, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """New top and total, the factor for what was summed so far, and this step's weights.

    The total keeps the lanes' sums apart until the end: only the largest score has to cross lanes at each step.
    """
    scores = jnp.where(visible, scores, NEVER)
    new_top = jnp.maximum(top, jnp.max(scores, axis=0))
    # Masked again: where a row has seen nothing yet, new_top is NEVER as well and the exponent says nothing.
    p = jnp.where(visible, jnp.exp2(scores - (new_top - _LIFT)[None]), 0.0)
    shrink = jnp.exp2(top - new_top)
    lanes, _, columns = total.shape
    total = total * shrink[None, None] + jnp.sum(p.reshape(lanes, 2, 8, columns), axis=1)
    return new_top, total, shrink, p
