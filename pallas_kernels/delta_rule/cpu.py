"""One value head's state through transitions, for a CPU: the code that decode and fold share, so that their bits are equal.

The columns of S never meet: sixteen of them, `[key_dim, 16]`, stay in the first cache from their first read-out to their
last row. With S' = decay S + k u^T a row takes two passes over the block (Gated Delta Networks, Yang et al. 2024, eq. 10):
r = S^T k, and then S' together with o = S'^T q and the next row's r. So a row costs one pass more than none, however many.

A sum over key_dim is two chains of multiply-adds, over even and odd k, and their sum: whatever the row, and whoever asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from pallas_kernels.delta_rule.records import Layout

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Code, Value, View

LANES = 16
CHAINS = 2


def unfit(op: str, key_dim: int, value_dim: int) -> str:
    """Why there is no CPU kernel for heads of this size, or nothing."""
    if key_dim % LANES or value_dim % LANES or key_dim > 512:
        sizes = f"key_dim {key_dim} and value_dim {value_dim}"
        return f"{op}: {sizes} must be multiples of {LANES} for the CPU kernel, key_dim at most 512"
    return ""


@dataclasses.dataclass(frozen=True)
class Block:
    """Sixteen columns of a head's S, from `column` on, and where the rows' records lie: rows `[ring, columns]` of one slot."""

    c: Code
    layout: Layout
    records: View
    head: Value
    column: Value
    held: View  # [key_dim, 16], on the stack

    def fetch(self, recurrent: View, slot: Value, row: Value) -> Value:
        """S enters the block; its read-out S^T k for the k of a record."""

        def body(k: Value, *sums: Value) -> list[Value]:
            new = []
            for i, total in enumerate(sums):
                s = recurrent.load(slot, self.head, k + i, self.column, lanes=LANES)
                self.held.store(s, k + i, 0)
                new.append(self.c.fma(s, self._k(row, k + i), total))
            return new

        return _joined(self.c.loop(0, self.layout.key_dim, self.c.zeros(CHAINS), body, step=CHAINS))

    def put_back(self, recurrent: View, slot: Value) -> None:
        def body(k: Value) -> None:
            recurrent.store(self.held.load(k, 0, lanes=LANES), slot, self.head, k, self.column)

        self.c.loop(0, self.layout.key_dim, [], body)

    def advance(self, seen: Value, row: Value, following: Value, q: View | None = None) -> tuple[Value, Value | None]:
        """S after the record in `row`, whose read-out is `seen`; the read-out for the record in `following`, and S^T q."""
        c, layout = self.c, self.layout
        decay, beta = (self.records.load(row, layout.keys + layout.values + i * layout.value_heads + self.head) for i in (0, 1))
        v = self.records.load(row, layout.keys + self.head * layout.value_dim + self.column, lanes=LANES)
        u = beta * (v - decay * seen)

        def body(k: Value, *sums: Value) -> list[Value]:
            new = list(sums)
            for i in range(CHAINS):
                s = c.fma(decay, self.held.load(k + i, 0, lanes=LANES), self._k(row, k + i) * u)
                self.held.store(s, k + i, 0)
                new[i] = c.fma(s, self._k(following, k + i), new[i])
                if q is not None:
                    new[CHAINS + i] = c.fma(s, q.load(k + i), new[CHAINS + i])
            return new

        sums = c.loop(0, layout.key_dim, c.zeros(CHAINS if q is None else 2 * CHAINS), body, step=CHAINS)
        return _joined(sums[:CHAINS]), None if q is None else _joined(sums[CHAINS:])

    def replay(self, seen: Value, start: Value, waiting: Value, last: Value) -> Value:
        """S after the `waiting` records from row `start` of the ring on, and the read-out for the one behind them; `last`
        counts the records there are, behind which none is read."""
        ring = self.records.shape[0]

        def row(i: Value) -> Value:
            return (start + self.c.minimum(i, last - 1)) % ring

        return self.c.loop(0, waiting, [seen], lambda i, seen: [self.advance(seen, row(i), row(i + 1))[0]])[0]

    def _k(self, row: Value, k: Value) -> Value:
        return self.records.load(row, self.head // self.layout.share * self.layout.key_dim + k)


def each_block(c: Code, layout: Layout, recurrent: View, records: View, slot: Value, head: Value, body: Callable) -> None:
    """body(block) for every sixteen columns of a head, whose slot's records are `records` `[ring, columns]`.

    The head behind it in memory is asked for meanwhile, line by line."""
    held = c.stack((layout.key_dim, LANES), "float32")

    def columns(column: Value) -> None:
        ahead = recurrent.part(slot, head + 1)
        c.loop(0, layout.key_dim * LANES, [], lambda i: c.prefetch(ahead.at(0, column * layout.key_dim + i), level=2), step=LANES)
        body(Block(c, layout, records, head, column, held))

    c.loop(0, layout.value_dim, [], columns, step=LANES)


def _joined(chains: list[Value]) -> Value:
    first, second = chains
    return first + second
