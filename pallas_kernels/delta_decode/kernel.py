"""The delta rule's part of a decode round in one launch: the rows that the last round accepted enter the states, then
convolution, norms, gates, recurrence and gated norm of the new rows, whose records wait for the next round.

A block owns one value head of one slot and takes all its rows one after another with S in registers. S is read once, and
written once, between the old rows and the new. Value heads that share a key head compute its q and k each for itself;
the first of them records k, and writes the raw inputs of both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_rule import step
from pallas_kernels.delta_rule.inputs import L2_EPS
from pallas_kernels.delta_rule.records import Layout, replay

MAX_ROWS = 6  # each is unrolled; registers run out beyond


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """The static facts the kernel body needs: rows a slot, heads, taps, rows of the rings."""

    rows: int
    layout: Layout
    width: int
    ring: int
    eps: float
    interpret: bool


@functools.partial(jax.jit, static_argnames=("rows", "eps", "interpret"))
def delta_decode(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    records: jax.Array,
    start: jax.Array,
    count: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    *,
    rows: int,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`delta_decode.delta_decode` in one launch: out, and conv, recurrent and records in place. Its checks are relied on.

    ValueError: rows outside 1..6, Dk or Dv that a block cannot hold.
    """
    slots, value_heads, key_dim, value_dim = recurrent.shape
    step.check_head("delta_decode", key_dim, value_dim)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"delta_decode: rows {rows}, from 1 to {MAX_ROWS} are allowed")
    key_heads = (conv.shape[2] - value_heads * value_dim) // (2 * key_dim)
    layout, width, ring = Layout(key_heads, value_heads, key_dim, value_dim), taps.shape[2], conv.shape[1]
    shape = DecodeShape(rows, layout, width, ring, eps, interpret)
    operands = (projected, ab, conv, recurrent, records, start, count, taps, a_log, dt_bias, norm)
    outputs = [jax.ShapeDtypeStruct((slots * rows, layout.values), projected.dtype)]
    outputs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (conv, recurrent, records)]
    return launch.launch(
        functools.partial(_decode_kernel, shape=shape),
        name=f"delta_decode_{rows}",
        grid=(value_heads, slots),
        in_specs=[launch.whole(x) for x in operands],
        out_specs=tuple(launch.whole(x) for x in outputs),
        out_shape=tuple(outputs),
        num_warps=step.WARPS,
        num_stages=1,
        aliases={2: 1, 3: 2, 4: 3},
        interpret=interpret,
    )(*operands)


def _decode_kernel(*refs: Any, shape: DecodeShape) -> None:
    """The round of one value head of one slot: rows that wait, then all new rows one after another."""
    # What changes in place is read through the outputs, which share its memory: reads and writes keep their order.
    projected, ab, _, _, _, start, count, taps, a_log, dt_bias, norm, out, conv, recurrent, records = refs
    head, slot = pl.program_id(0), pl.program_id(1)
    first = slot * shape.rows
    begin, pending = launch.load(start, slot), launch.load(count, slot)
    own = pl.ds(head * shape.layout.value_dim, shape.layout.value_dim)

    # A slot that takes no part: its rows of `out` exist and get zeros, its state and rings are not touched.
    @pl.when(pending < 0)
    def _() -> None:
        for row in range(shape.rows):
            launch.store(out, (first + row, own), jnp.zeros(shape.layout.value_dim, out.dtype))

    @pl.when(pending >= 0)
    def _() -> None:
        # Asked for first: the inputs of the new rows are prepared while S is on its way.
        state = step.load_state(recurrent, slot, head)
        accepted = jnp.minimum(pending, shape.ring - shape.rows)
        at = begin + accepted
        pairs, vs = _inputs(projected, conv, taps, slot, head, at, shape)
        gates = [_decay_and_beta(ab, a_log, dt_bias, first + row, head, shape) for row in range(shape.rows)]

        # What was accepted enters S, which goes back to memory only if that changed it: new rows may yet be rejected.
        state = replay(state, records, slot, begin, accepted, head, shape.layout, shape.interpret)

        @pl.when(accepted > 0)
        def _() -> None:
            step.store_state(recurrent, slot, head, state)

        for row, (qk, v, (decay, beta)) in enumerate(zip(pairs, vs, gates, strict=True)):
            # The record first: from here on the row is as replay will see it, k and v in float32.
            v = v.astype(jnp.float32)
            shape.layout.store(records, slot, jax.lax.rem(at + row, shape.ring), head, qk, v, decay, beta)
            # One step of the delta rule, then S^T q of the state after it.
            k = step.column_pair(qk, shape.layout.value_dim)[1]
            u = step.update(state, k, v, decay, beta, shape.interpret)
            state = step.advance(state, k, u, decay, shape.interpret)
            q = step.column_pair(qk * shape.layout.key_dim**-0.5, shape.layout.value_dim)[0]
            x = step.read_out(state, q, shape.interpret)
            _finish(x, projected, norm, out, first + row, head, shape)


def _inputs(
    projected: Any, conv: Any, taps: Any, slot: Any, head: Any, at: Any, shape: DecodeShape
) -> tuple[list[jax.Array], list[jax.Array]]:
    """q and k of every row, L2 norm 1, as the two rows of `[2, Dk]` (one element a thread for both); and its v `[Dv]`. Their
    raw inputs go into the ring, those of q and k by one head of those that share them."""
    layout = shape.layout
    # The channels of this head: q and k of its key head, and its own v.
    key_head = head // layout.share
    pair = jnp.arange(2)[:, None] * layout.keys + key_head * layout.key_dim + jnp.arange(layout.key_dim)[None]
    own = 2 * layout.keys + head * layout.value_dim + jnp.arange(layout.value_dim)
    writes = jnp.broadcast_to(head % layout.share == 0, pair.shape)
    pairs = _convolve(projected, conv, taps, slot, pair, at, writes, shape)
    vs = _convolve(projected, conv, taps, slot, own, at, None, shape)
    return [_l2_normalise(x.astype(jnp.float32), shape) for x in pairs], vs


def _convolve(
    projected: Any, conv: Any, taps: Any, slot: Any, channels: Any, at: Any, writes: Any, shape: DecodeShape
) -> list[jax.Array]:
    """SiLU of the causal convolution of `channels` for every row: float32 like `channels`, rounded as projected is. The
    window starts at row `at` of the ring, its raw inputs go behind it where `writes` (None: everywhere)."""
    # The window before the round, and the new raw inputs, which go behind it for the rounds to come.
    ring, kept = shape.ring, shape.width - 1
    raw = [launch.load(conv, (slot, jax.lax.rem(at + i, ring), channels)) for i in range(kept)]
    fresh = [launch.load(projected, (slot * shape.rows + row, channels)) for row in range(shape.rows)]
    for row, x in enumerate(fresh):
        launch.store(conv, (slot, jax.lax.rem(at + kept + row, ring), channels), x, writes)
    raw = [x.astype(jnp.float32) for x in (*raw, *fresh)]
    weights = [launch.load(taps, (channels, 0, tap)) for tap in range(shape.width)]
    # A chain of multiply-adds over the taps, in one order for every number of rows.
    mixed = []
    for row in range(shape.rows):
        total = step.product(raw[row], weights[0], shape.interpret)
        for tap in range(1, shape.width):
            total = step.multiply_add(raw[row + tap], weights[tap], total, shape.interpret)
        mixed.append(jax.nn.silu(total).astype(projected.dtype))
    return mixed


def _l2_normalise(pair: jax.Array, shape: DecodeShape) -> jax.Array:
    """q and k `[2, Dk]` with L2 norm 1, q then times Dk^-1/2."""
    squares = jnp.sum(step.product(pair, pair, shape.interpret), axis=1, keepdims=True)
    return pair * jax.lax.rsqrt(squares + L2_EPS)


def _decay_and_beta(ab: Any, a_log: Any, dt_bias: Any, token: Any, head: Any, shape: DecodeShape) -> tuple[jax.Array, jax.Array]:
    """exp(-exp(A_log) softplus(a + dt_bias)) and sigmoid(b), float32 scalars."""
    a = launch.load(ab, (token, head)).astype(jnp.float32) + launch.load(dt_bias, head)
    b = launch.load(ab, (token, shape.layout.value_heads + head)).astype(jnp.float32)
    decay = jnp.exp(-jnp.exp(launch.load(a_log, head)) * jax.nn.softplus(a))
    return decay, jax.nn.sigmoid(b)


def _finish(x: jax.Array, projected: Any, norm: Any, out: Any, token: Any, head: Any, shape: DecodeShape) -> None:
    """Gated RMS norm of a head's output, stored: (x * rsqrt(mean x^2 + eps), rounded) * weight * silu(z)."""
    value_dim = shape.layout.value_dim
    mean = jnp.sum(step.product(x, x, shape.interpret)) / value_dim
    normed = (x * jax.lax.rsqrt(mean + shape.eps)).astype(out.dtype).astype(jnp.float32)
    z = launch.load(projected, (token, pl.ds(shape.layout.channels + head * value_dim, value_dim)))
    y = normed * launch.load(norm, pl.ds(0, value_dim)) * jax.nn.silu(z.astype(jnp.float32))
    launch.store(out, (token, pl.ds(head * value_dim, value_dim)), y)
