"""The sums of a draw on a CPU, a part a row: totals in 16 lanes by column, what lies before a rank by rank.

Probabilities are sums' terms over their total here, where the reference divides first: both are off by some last bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu

LANES = 16


def draw_sorted(values: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, uniform: jax.Array) -> jax.Array:
    """`draw.draw_sorted` on a CPU; its checks are relied on."""
    slots, rows, n = values.shape
    whole = n - n % LANES

    def build(c: Any, values: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any, out: Any, weights: Any) -> None:
        """weights [slots, rows, n]: e^value of each rank, then the sum of those that stay up to it."""
        slot, row = c.part // rows, c.part % rows
        asked = top_k.integer(slot)
        count = c.select((asked > 0) & (asked < n), asked, c.index(n))

        def weigh(i: Any, total: Any) -> list[Any]:
            w = c.exp(values.load(slot, row, i, lanes=total.lanes))
            weights.store(w, slot, row, i)
            return [total + w]

        [total] = c.loop(0, whole, c.zeros(1), weigh, step=LANES)
        [total] = c.loop(whole, n, [total.sum()], weigh)
        # Where top_k cuts, the first ones by rank instead of all of them.
        some = c.select(count < n, count, c.index(0))
        [cut] = c.loop(0, some, c.zeros(1, lanes=0), lambda i, total: [total + weights.load(slot, row, i)])
        total = c.select(count < n, cut, total)
        share, least = top_p.load(slot) * total, min_p.load(slot) * weights.load(slot, row, 0)

        def keep(i: Any, before: Any, reach: Any, kept: Any) -> list[Any]:
            w = weights.load(slot, row, i)
            stays = i.equals(0) | ((i < count) & (before < share) & (w >= least))
            reach = c.select(stays, reach + w, reach)
            weights.store(reach, slot, row, i)
            return [c.select(i < count, before + w, before), reach, kept + (stays & (w > 0.0)).to(c.i64, signed=False)]

        zero = c.zeros(2, lanes=0)
        _, reach, kept = c.loop(0, n, [*zero, c.index(0)], keep)
        target = uniform.load(slot, row) * reach

        def passed(i: Any, found: Any) -> list[Any]:
            return [found + (weights.load(slot, row, i) <= target).to(c.i64, signed=False)]

        [found] = c.loop(0, n, [c.index(0)], passed)
        # At most the last kept one, even where rounding leaves the sum just below the target.
        out.store(c.select(found < kept, found, kept - 1).to(c.i32), slot, row)

    arguments = [values, top_k, top_p, min_p, uniform]
    struct = jax.ShapeDtypeStruct
    call = cpu.kernel(
        "draw_sorted",
        build,
        arguments,
        [struct((slots, rows), jnp.int32)],
        parts=slots * rows,
        workspace=[struct((slots, rows, n), jnp.float32)],
    )
    return call(*arguments)[0]


def log_total(logits: jax.Array) -> jax.Array:
    """`draw.log_total` on a CPU."""
    *lead, n = logits.shape
    flat = logits.reshape(-1, n)
    whole = n - n % LANES

    def build(c: Any, x: Any, out: Any) -> None:
        def largest(i: Any, most: Any) -> list[Any]:
            return [c.maximum(most, x.load(c.part, i, lanes=most.lanes))]

        low = c.constant(-float("inf"))
        [most] = c.loop(0, whole, [c.spread(low)], largest, step=LANES)
        [most] = c.loop(whole, n, [most.max()], largest)

        def add(i: Any, total: Any) -> list[Any]:
            return [total + c.exp(x.load(c.part, i, lanes=total.lanes) - most)]

        [total] = c.loop(0, whole, c.zeros(1), add, step=LANES)
        [total] = c.loop(whole, n, [total.sum()], add)
        out.store(c.log(total) + most, c.part)

    call = cpu.kernel("log_total", build, [flat], [jax.ShapeDtypeStruct((flat.shape[0],), jnp.float32)], parts=flat.shape[0])
    return call(flat)[0].reshape(lead)
