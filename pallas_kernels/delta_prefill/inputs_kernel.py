"""First launch: what every token brings. The causal convolution of all channels, the lengths of q and k, the gates, and
the window that the next chunk starts from.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_prefill.parts import round_bf16

L2_EPS = 1e-6  # inside the root, on the sum of squares
# Tokens of a block: of the WY form, and here of the stretch that is convolved at once.
BLOCK = 32
# Rows of the gates: beta; the log-decays of a block up to a token, that token included; those after it.
BETA, BEFORE, AFTER = range(3)


class Inputs(NamedTuple):
    """mixed `[tokens, channels]` in projected's type: SiLU of the convolution, zeros from token `count` on.
    lengths float32 `[2 * key_heads, tokens]`: 1 / sqrt(|x|^2 + 1e-6) of the heads of q, then of k.
    gates float32 `[3, value_heads, tokens]`: beta, and the sums of g in each block of 32 tokens; g = beta = 0 from token
    `count` on.
    window `[width - 1, channels]` bf16: the last raw inputs up to token `count`."""

    mixed: jax.Array
    lengths: jax.Array
    gates: jax.Array
    window: jax.Array


def token_inputs(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    slot: jax.Array,
    count: jax.Array,
    *,
    key_heads: int,
    dim: int,
    warps: int = 4,
    interpret: bool = False,
) -> Inputs:
    """The arguments are those of `delta_prefill.delta_prefill`, slot and count as int32 `[1]`; dim: of key and value heads."""
    tokens, value_heads = projected.shape[0], a_log.shape[0]
    channels, _, width = taps.shape
    struct: Any = jax.ShapeDtypeStruct
    out = Inputs(
        struct((tokens, channels), projected.dtype),
        struct((2 * key_heads, tokens), jnp.float32),
        struct((3, value_heads, tokens), jnp.float32),
        struct((width - 1, channels), conv.dtype),
    )
    operands = (projected, ab, conv, taps, a_log, dt_bias, slot, count)
    return launch.launch(
        functools.partial(_kernel, key_heads=key_heads, dim=dim, interpret=interpret),
        name="delta_prefill_inputs",
        grid=(channels // dim, tokens // BLOCK),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=jax.tree.map(launch.whole, out),
        out_shape=out,
        num_warps=warps,
        num_stages=1,
        interpret=interpret,
    )(*operands)


def _kernel(
    x_ref: Any,
    ab_ref: Any,
    conv_ref: Any,
    taps_ref: Any,
    a_log_ref: Any,
    dt_bias_ref: Any,
    slot_ref: Any,
    count_ref: Any,
    *refs: Any,
    key_heads: int,
    dim: int,
    interpret: bool,
) -> None:
    """One head of q, k or v, or its share of channels, for a block of tokens."""
    out = Inputs(*refs)
    slot, count = launch.load(slot_ref, 0), launch.load(count_ref, 0)
    _, value_heads, _ = out.gates.shape
    width = taps_ref.shape[2]
    head, start = pl.program_id(0), pl.program_id(1) * BLOCK
    first, rows = head * dim, pl.ds(start, BLOCK)
    row = start + jnp.arange(BLOCK)[:, None]
    column = first + jnp.arange(dim)[None]

    def raw(row: jax.Array, column: jax.Array, wanted: jax.Array) -> jax.Array:
        """Raw inputs of token `row`, of the window of before where that is negative, 0 where not wanted."""
        new = launch.load(x_ref, (row, column), wanted & (row >= 0))
        return jnp.where(row < 0, launch.load(conv_ref, (slot, row + width - 1, column), wanted & (row < 0)), new)

    # The causal convolution, tap by tap, its SiLU, and the rounding that the model has there. Padding becomes zeros.
    total = jnp.zeros((BLOCK, dim), jnp.float32)
    for tap in range(width):
        x = raw(row - (width - 1 - tap), column, jnp.broadcast_to(row < count, total.shape))
        total += x.astype(jnp.float32) * launch.load(taps_ref, (column, 0, tap))
    mixed = round_bf16(jax.nn.silu(total), interpret)
    launch.store(out.mixed, (rows, pl.ds(first, dim)), mixed)

    # 1 / |x| of q and k: a factor of rows and columns later, so that products take the bf16 numbers as they are.
    @pl.when(head < 2 * key_heads)
    def _lengths() -> None:
        x = mixed.astype(jnp.float32)
        launch.store(out.lengths, (head, rows), jax.lax.rsqrt(jnp.sum(x * x, axis=1) + L2_EPS))

    # Gates of value head `head`; g = beta = 0 makes padding no token to the delta rule.
    @pl.when(head < value_heads)
    def _gates() -> None:
        valid = start + jnp.arange(BLOCK) < count
        a = launch.load(ab_ref, (rows, head)).astype(jnp.float32)
        b = launch.load(ab_ref, (rows, value_heads + head)).astype(jnp.float32)
        rate, bias = jnp.exp(launch.load(a_log_ref, head)), launch.load(dt_bias_ref, head)
        g = jnp.where(valid, -rate * jax.nn.softplus(a + bias), 0.0)
        # Sums of g up to each token, its own included, and of what follows: as masked sums of a square, in one fixed order.
        g = jnp.broadcast_to(g[None], (BLOCK, BLOCK))
        before = jax.lax.broadcasted_iota(jnp.int32, g.shape, 1) <= jax.lax.broadcasted_iota(jnp.int32, g.shape, 0)
        launch.store(out.gates, (BETA, head, rows), jnp.where(valid, jax.nn.sigmoid(b), 0.0))
        launch.store(out.gates, (BEFORE, head, rows), jnp.sum(jnp.where(before, g, 0.0), axis=1))
        launch.store(out.gates, (AFTER, head, rows), jnp.sum(jnp.where(before, 0.0, g), axis=1))

    # The window that the next chunk begins with, once for each channel.
    @pl.when(start == 0)
    def _window() -> None:
        # A row of one token at a time: 1-D, as it is stored.
        line = first + jnp.arange(dim)
        for i in range(width - 1):
            x = raw(jnp.broadcast_to(count + i - (width - 1), line.shape), line, jnp.ones(line.shape, bool))
            launch.store(out.window, (i, pl.ds(first, dim)), x)
