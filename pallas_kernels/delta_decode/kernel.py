"""The delta rule's decode rows in one launch: convolution, norms, gates, recurrence, gated norm and replay records.

A block owns one value head of one slot and takes its rows one after another with S in registers; S is only read. The
state after a slot's last row is never formed: S'^T q = decay S^T q + (k . q) u. Value heads that share a key head
compute its q and k each for itself; the first of them records k.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_rule import Transitions, step
from pallas_kernels.delta_rule.inputs import L2_EPS

MAX_ROWS = 6  # each is unrolled; registers run out beyond


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """The static facts the kernel body needs: rows a slot, heads, widths."""

    rows: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    interpret: bool

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.value_heads * self.value_dim

    @property
    def share(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads


@functools.partial(jax.jit, static_argnames=("rows", "eps", "interpret"))
def delta_decode(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    *,
    rows: int,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, Transitions]:
    """Outputs and replay records of `rows` rows a slot, which follow `recurrent` and `conv`; both stay as they are.

    projected bf16 `[slots * rows, channels + Hv * Dv]`: raw convolution inputs [q | k | v], then the gate z; ab bf16
    `[slots * rows, 2 * Hv]`: a, then b; conv bf16 `[slots, width - 1, channels]`: the raw inputs before, oldest first;
    recurrent float32 `[slots, Hv, Dk, Dv]`; taps float32 `[channels, 1, width]`; a_log, dt_bias float32 `[Hv]`;
    norm float32 `[Dv]`. Returns out `[slots * rows, Hv * Dv]` in projected's dtype, and float32 Transitions.
    A row's bits depend on the rows before it only. ValueError: rows outside 1..6, Dk or Dv that a block cannot hold.
    """
    slots, value_heads, key_dim, value_dim = recurrent.shape
    step.check_head("delta_decode", key_dim, value_dim)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"delta_decode: rows {rows}, from 1 to {MAX_ROWS} are allowed")
    key_heads = (conv.shape[2] - value_heads * value_dim) // (2 * key_dim)
    shape = DecodeShape(rows, key_heads, value_heads, key_dim, value_dim, taps.shape[2], eps, interpret)
    struct = jax.ShapeDtypeStruct
    outputs = (
        struct((slots * rows, value_heads * value_dim), projected.dtype),
        struct((slots, rows, key_heads, key_dim), jnp.float32),
        struct((slots, rows, value_heads, value_dim), jnp.float32),
        struct((slots, rows, value_heads), jnp.float32),
        struct((slots, rows, value_heads), jnp.float32),
    )
    operands = (projected, ab, conv, recurrent, taps, a_log, dt_bias, norm)
    out, *records = launch.launch(
        functools.partial(_decode_kernel, shape=shape),
        name=f"delta_decode_{rows}",
        grid=(value_heads, slots),
        in_specs=[launch.whole(x) for x in operands],
        out_specs=tuple(launch.whole(x) for x in outputs),
        out_shape=outputs,
        num_warps=step.WARPS,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    return out, Transitions(*records)


def _decode_kernel(*refs: Any, shape: DecodeShape) -> None:
    projected, ab, conv, recurrent, taps, a_log, dt_bias, norm, out, *records = refs
    head, slot = pl.program_id(0), pl.program_id(1)
    key_head = head // shape.share
    first = slot * shape.rows
    # Asked for first, needed last: everything up to the recurrence runs while S is on its way.
    state = step.load_state(recurrent, slot, head)

    # q in row 0, k in row 1: one element a thread for both.
    pair = jnp.arange(2)[:, None] * shape.keys + key_head * shape.key_dim + jnp.arange(shape.key_dim)[None]
    own = 2 * shape.keys + head * shape.value_dim + jnp.arange(shape.value_dim)
    pairs = _convolve(projected, conv, taps, slot, pair, shape)
    vs = _convolve(projected, conv, taps, slot, own, shape)
    pairs = [_l2_normalise(x.astype(jnp.float32), shape) for x in pairs]
    gates = [_decay_and_beta(ab, a_log, dt_bias, first + row, head, shape) for row in range(shape.rows)]

    for row, (qk, v, (decay, beta)) in enumerate(zip(pairs, vs, gates)):
        v = v.astype(jnp.float32)
        _record(records, slot, row, head, qk, v, decay, beta, shape)
        _, k = step.column_pair(qk, shape.value_dim)
        u = step.update(state, k, v, decay, beta, shape.interpret)
        state = step.advance(state, k, u, decay, shape.interpret)
        q, _ = step.column_pair(qk * shape.key_dim**-0.5, shape.value_dim)
        x = step.read_out(state, q, shape.interpret)
        _finish(x, projected, norm, out, first + row, head, shape)


def _convolve(projected: Any, conv: Any, taps: Any, slot: Any, channels: Any, shape: DecodeShape) -> list[jax.Array]:
    """SiLU of the causal convolution of `channels` for every row: float32 like `channels`, rounded as projected is."""
    raw = [launch.load(conv, (slot, i, channels)) for i in range(shape.width - 1)]
    raw += [launch.load(projected, (slot * shape.rows + row, channels)) for row in range(shape.rows)]
    raw = [x.astype(jnp.float32) for x in raw]
    weights = [launch.load(taps, (channels, 0, tap)) for tap in range(shape.width)]
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


def _decay_and_beta(
    ab: Any, a_log: Any, dt_bias: Any, token: Any, head: Any, shape: DecodeShape
) -> tuple[jax.Array, jax.Array]:
    """exp(-exp(A_log) softplus(a + dt_bias)) and sigmoid(b), float32 scalars."""
    a = launch.load(ab, (token, head)).astype(jnp.float32) + launch.load(dt_bias, head)
    b = launch.load(ab, (token, shape.value_heads + head)).astype(jnp.float32)
    decay = jnp.exp(-jnp.exp(launch.load(a_log, head)) * jax.nn.softplus(a))
    return decay, jax.nn.sigmoid(b)


def _record(
    records: Any, slot: Any, row: int, head: Any, qk: Any, v: Any, decay: Any, beta: Any, shape: DecodeShape
) -> None:
    k_ref, v_ref, decay_ref, beta_ref = records
    is_k = jnp.broadcast_to(jnp.arange(2)[:, None] == 1, qk.shape)
    dims = jnp.broadcast_to(jnp.arange(shape.key_dim)[None], qk.shape)
    launch.store(k_ref, (slot, row, head // shape.share, dims), qk, is_k & (head % shape.share == 0))
    launch.store(v_ref, (slot, row, head, pl.ds(0, shape.value_dim)), v)
    launch.store(decay_ref, (slot, row, head), decay)
    launch.store(beta_ref, (slot, row, head), beta)


def _finish(x: jax.Array, projected: Any, norm: Any, out: Any, token: Any, head: Any, shape: DecodeShape) -> None:
    """Gated RMS norm of a head's output, stored: (x * rsqrt(mean x^2 + eps), rounded) * weight * silu(z)."""
    mean = jnp.sum(step.product(x, x, shape.interpret)) / shape.value_dim
    normed = (x * jax.lax.rsqrt(mean + shape.eps)).astype(out.dtype).astype(jnp.float32)
    own = pl.ds(head * shape.value_dim, shape.value_dim)
    z = launch.load(projected, (token, pl.ds(shape.channels + head * shape.value_dim, shape.value_dim)))
    y = normed * launch.load(norm, pl.ds(0, shape.value_dim)) * jax.nn.silu(z.astype(jnp.float32))
    launch.store(out, (token, own), y)
