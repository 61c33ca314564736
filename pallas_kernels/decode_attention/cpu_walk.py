"""One split's walk over its pages, and the merge of all splits, as code for a CPU.

Scores of 16 tokens at a time: a dot product is 16 chains over head_dim, added by halves (`_totals` does so for 16 products
at once). Online softmax a page at a time (Milakov and Gimelshein 2018), then the page's values times their weights, token
after token. A column, one (row, query head) pair, meets no other one: which columns share registers is a matter of speed.
A page that a row does not see changes no bit of it: factor exp(0), and products with zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels import cpu
from pallas_kernels.cpu.emit import I32, LANES, Code, Value, View
from pallas_kernels.decode_attention.cpu import SPLITS, Shape
from pallas_kernels.kv_codecs.cpu import Part, rotate
from pallas_kernels.kv_pages import PAGE

BLOCK = 16  # tokens whose keys, or values, are decoded and used together
_TURNS = 2  # threads that are thought to share the parts; decides what is asked for early, and no bit
_NEVER = -1e30  # a score below every real one; finite, so that a fully masked page gives no NaN

# A stored row as float32: load(token of the block, dim), 16 lanes.
Rows = Callable[[int | Value, Value], Value]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of what is in registers at once: tokens x columns of scores, columns x 16 dims of sums. Decides no bit."""

    tokens: int
    columns: int
    dims: int

    @classmethod
    def here(cls) -> Tile:
        """For 32 registers of 16 lanes, or 16 of 8."""
        return cls(4, 6, 4) if cpu.here().has("avx512f") else cls(2, 3, 2)

    def cut(self, columns: int) -> list[tuple[int, int, int]]:
        """(first, count, width): `count` tiles of `width` columns from `first` on, of widths as equal as they can be."""
        tiles = -(-columns // self.columns)
        width, wider = divmod(columns, tiles)
        return [(0, wider, width + 1)] * (wider > 0) + [(wider * (width + 1), tiles - wider, width)]


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A block of rows that will be read soon."""

    part: Part
    page: Value
    head: Value
    token: Value

    def ask(self, i: int | Value, d: Value | None = None) -> None:
        """For the 16 numbers from dim `d` on of token i, or for all of the token."""
        if d is None:
            self.part.ask(self.page, self.head, self.token + i, dims=self.part.dims)
        else:
            self.part.ask(self.page, self.head, self.token + i, d)


class Walk:
    """A part: one split of one slot and KV head."""

    def __init__(self, c: Code, shape: Shape, inputs: Sequence[View], leaves: Sequence[View], results: Sequence[View]):
        self.c, self.shape, self.tile = c, shape, Tile.here()
        self.q, self.projected, self.table, self.positions, self.filled = inputs
        self.out, self.sums, self.tops, self.totals, self.left = results
        cut = len(leaves) // 2
        self.k, self.v = Part(c, shape.format, "k", leaves[:cut]), Part(c, shape.format, "v", leaves[cut:])
        split, place = c.part % SPLITS, c.part // SPLITS
        self.slot, self.head = place // shape.kv_heads, place % shape.kv_heads
        self.own = (self.slot, self.head, split)
        self.count = self.filled.integer(self.slot)

    def run(self) -> None:
        c, split = self.c, self.own[2]
        pages = (self.count + PAGE - 1) // PAGE
        with c.when(split < pages):
            self._start()
            rows = c.stack((BLOCK, self.shape.dims), "float32")
            scores, totals = c.stack((self.shape.columns, PAGE), "float32"), c.stack((self.shape.columns, LANES), "float32")
            c.loop(0, self.shape.columns, [], lambda column: totals.store(c.constant(0.0, lanes=LANES), column, 0))
            c.loop(split, pages, [], lambda page: self._page(page, pages, rows, scores, totals), step=SPLITS)
            finish = lambda column: self.totals.store(totals.load(column, 0, lanes=LANES).sum(), *self.own, column)  # noqa: E731
            c.loop(0, self.shape.columns, [], finish)
        place = c.b.bitcast(self.left.at(self.slot, self.head), I32.as_pointer())
        left = c.b.atomic_rmw("sub", place, c.constant(1, I32).ir, "acq_rel")
        with c.when(Value(c, left).equals(1)):
            merged = c.stack((self.shape.dims,), "float32")
            c.loop(0, self.shape.columns, [], lambda column: self._merge(column, merged))

    def _start(self) -> None:
        c, zero = self.c, self.c.constant(0.0, lanes=LANES)

        def column(i: Value) -> None:
            self.tops.store(_NEVER, *self.own, i)
            c.loop(0, self.shape.dims, [], lambda d: self.sums.store(zero, *self.own, i, d), step=LANES)

        c.loop(0, self.shape.columns, [], column)

    def _last(self, column: Value) -> Value:
        """The last token that a column sees; -1: none."""
        return self.c.minimum(self.positions.integer(self.slot, column // self.shape.group), self.count - 1)

    def _page(self, number: Value, pages: Value, rows: View, scores: View, totals: View) -> None:
        c = self.c
        page = self.table.integer(self.slot, number)
        valid = c.minimum(self.count - number * PAGE, PAGE)

        def keys(token: Value) -> None:
            load = self._rows(self.k, page, token, c.minimum(valid - token, BLOCK), rows, Ahead(self.v, page, self.head, token))
            self._tiles(lambda column, width: self._score(load, token, column, width, scores))

        c.loop(0, valid, [], keys, step=BLOCK)
        c.loop(0, self.shape.columns, [], lambda column: self._soften(column, number, scores, totals))
        following, head = self._following(number, pages)

        def values(token: Value) -> None:
            tokens = c.minimum(valid - token, BLOCK)
            load = self._rows(self.v, page, token, tokens, rows, Ahead(self.k, following, head, token))
            self._tiles(lambda column, width: self._add(load, token, tokens, column, width, scores))

        c.loop(0, valid, [], values, step=BLOCK)

    def _following(self, number: Value, pages: Value) -> tuple[Value, Value]:
        """Page and head of the keys that this thread will probably read next: of its next page; behind its last one those of
        the part that it takes next where two threads take turns, of which it may ask what it will."""
        c, shape = self.c, self.shape
        coming = c.minimum(c.part + _TURNS, shape.slots * shape.kv_heads * SPLITS - 1)
        place, more = coming // SPLITS, number + SPLITS < pages
        slot = c.select(more, self.slot, place // shape.kv_heads)
        head = c.select(more, self.head, place % shape.kv_heads)
        index = c.minimum(c.select(more, number + SPLITS, coming % SPLITS), shape.per_slot - 1)
        return self.table.integer(slot, index), head

    def _rows(self, part: Part, page: Value, token: Value, tokens: Value, rows: View, ahead: Ahead) -> Rows:
        """The block's keys or values, decoded into `rows` where they are not float32 already. Whoever reads them asks for
        what comes next at the same pace: asked for at once, it would hold everything up until it is there."""
        if part.plain:

            def stored(i: int | Value, d: Value) -> Value:
                ahead.ask(i, d)
                return part.codes.load(page, self.head, token + i, d, lanes=LANES)

            return stored

        def one(i: Value) -> None:
            ahead.ask(i)
            part.load(page, self.head, token + i, rows, i)

        self.c.loop(0, tokens, [], one)
        return lambda i, d: rows.load(i, d, lanes=LANES)

    def _tiles(self, body: Callable[[Value, int], None]) -> None:
        for first, count, width in self.tile.cut(self.shape.columns):
            self.c.loop(first, first + count * width, [], lambda column, width=width: body(column, width), step=width)

    def _score(self, load: Rows, token: Value, column: Value, width: int, scores: View) -> None:
        """Scores of the block's 16 tokens in `width` columns; those behind the last are garbage."""
        c, tokens = self.c, self.tile.tokens
        partial = c.stack((width, BLOCK, LANES), "float32")
        columns = [(column + j) // self.shape.group for j in range(width)]
        heads = [self.head * self.shape.group + (column + j) % self.shape.group for j in range(width)]

        def some(first: Value) -> None:
            def dims(d: Value, *sums: Value) -> list[Value]:
                qs = [self.q.load(self.slot, row, head, d, lanes=LANES) for row, head in zip(columns, heads, strict=True)]
                ks = [load(first + i, d) for i in range(tokens)]
                return [c.fma(k, q, sums[i * width + j]) for i, k in enumerate(ks) for j, q in enumerate(qs)]

            sums = c.loop(0, self.shape.dims, c.zeros(tokens * width), dims, step=LANES)
            for n, total in enumerate(sums):
                partial.store(total, n % width, first + n // width, 0)

        c.loop(0, BLOCK, [], some, step=tokens)
        for j in range(width):
            scores.store(_totals([partial.load(j, i, 0, lanes=LANES) for i in range(BLOCK)]), column + j, token)

    def _soften(self, column: Value, number: Value, scores: View, totals: View) -> None:
        """A column's scores of a page become weights; what was summed before shrinks to the new largest score."""
        c = self.c
        last = self._last(column).to(I32)
        values, seen = [], []
        for at in range(0, PAGE, LANES):
            token = (number * PAGE).to(I32) + c.constant(range(at, at + LANES), I32)
            seen.append(token <= c.spread(last))
            values.append(c.select(seen[-1], scores.load(column, at, lanes=LANES), _NEVER))
        old = self.tops.load(*self.own, column)
        a, b, d, e = values
        top = c.maximum(c.maximum(c.maximum(a, b), c.maximum(d, e)).max(), old)
        weights = [c.select(mask, c.exp(x - top), 0.0) for mask, x in zip(seen, values, strict=True)]
        for at, w in enumerate(weights):
            scores.store(w, column, at * LANES)
        a, b, d, e = weights
        shrink = c.exp(old - top)
        totals.store(c.fma(totals.load(column, 0, lanes=LANES), shrink, (a + b) + (d + e)), column, 0)
        with c.when(top > old):
            self.tops.store(top, *self.own, column)

            def scale(d: Value) -> None:
                self.sums.store(self.sums.load(*self.own, column, d, lanes=LANES) * shrink, *self.own, column, d)

            c.loop(0, self.shape.dims, [], scale, step=LANES)

    def _add(self, load: Rows, token: Value, tokens: Value, column: Value, width: int, weights: View) -> None:
        """The block's values times their weights, onto the sums of `width` columns."""
        c, parts = self.c, self.tile.dims

        def dims(d: Value) -> None:
            places = [(*self.own, column + j, d + i * LANES) for j in range(width) for i in range(parts)]

            def one(t: Value, *sums: Value) -> list[Value]:
                vs = [load(t, d + i * LANES) for i in range(parts)]
                ws = [weights.load(column + j, token + t) for j in range(width)]
                return [c.fma(w, v, sums[j * parts + i]) for j, w in enumerate(ws) for i, v in enumerate(vs)]

            sums = c.loop(0, tokens, [self.sums.load(*p, lanes=LANES) for p in places], one)
            for total, place in zip(sums, places, strict=True):
                self.sums.store(total, *place)

        c.loop(0, self.shape.dims, [], dims, step=parts * LANES)

    def _merge(self, column: Value, merged: View) -> None:
        """The splits that hold a page which the column sees become one: times 1 / total, rotated back, rounded, gated."""
        c, shape = self.c, self.shape
        place = (self.slot, self.head)
        splits = c.minimum((self._last(column) + PAGE) // PAGE, SPLITS)
        largest = lambda s, top: [c.maximum(self.tops.load(*place, s, column), top)]  # noqa: E731
        [top] = c.loop(0, splits, [c.constant(_NEVER)], largest)
        weights = c.stack((SPLITS,), "float32")

        def weigh(s: Value, total: Value) -> list[Value]:
            weight = c.exp(self.tops.load(*place, s, column) - top)
            weights.store(weight, s)
            return [c.fma(weight, self.totals.load(*place, s, column), total)]

        [total] = c.loop(0, splits, [c.constant(0.0)], weigh)
        divisor = c.select(total > 0.0, total, c.constant(1.0))

        def gather(d: Value) -> None:
            add = lambda s, x: [c.fma(weights.load(s), self.sums.load(*place, s, column, d, lanes=LANES), x)]  # noqa: E731
            [x] = c.loop(0, splits, c.zeros(1), add)
            merged.store(x / divisor + 0.0, d)  # of -0, which tells who had zeros added to it, comes 0

        c.loop(0, shape.dims, [], gather, step=LANES)
        if shape.rotated:
            rotate(c, merged)
        head = self.head * shape.group + column % shape.group
        line = self.slot * shape.rows + column // shape.group

        def gated(d: Value) -> None:
            gate = self._rounded(c.sigmoid(self.projected.load(line, (2 * head + 1) * shape.dims + d, lanes=LANES)))
            value = self._rounded(merged.load(d, lanes=LANES)) * gate
            self.out.store(c.select(total > 0.0, value, c.constant(0.0, lanes=LANES)), line, head * shape.dims + d)

        c.loop(0, shape.dims, [], gated, step=LANES)

    def _rounded(self, x: Value) -> Value:
        return self.c.round_bf16(x) if self.shape.dtype == "bfloat16" else x


def _totals(vectors: list[Value]) -> Value:
    """The sums of the lanes of each of 16 vectors, by halves (lane i and lane i + 8 first), as one vector."""
    width = LANES // 2
    while width:
        halves = range(0, LANES, 2 * width)
        low = [i for at in halves for i in (*range(at, at + width), *range(LANES + at, LANES + at + width))]
        n = len(vectors) // 2
        vectors = [a.take(low, b) + a.take([i + width for i in low], b) for a, b in zip(vectors[:n], vectors[n:], strict=True)]
        width //= 2
    return vectors[0]
