"""Second launch: what a block of 32 tokens needs of itself, for every block and value head at once.

With G = cumsum(g), D_ij = exp(G_i - G_j) for i >= j and A = strict_lower((beta K) K^T * D) (the WY form of
`delta_rule.chunked`), T = (I + A)^-1 diag(beta) and R = V - e^G K S, the block's outputs and the new state are
    O = e^G Q S + M R,  M = lower(Q K^T * D) T;  S <- e^G_end S + K^T W R,  W = e^(G_end - G) T
so that the state's launch makes one R of each block and multiplies it twice. q and k come as bf16, their lengths are
factors of rows and columns, so that Q K^T and K K^T are exact.

Blocks of 32 tokens and not of 64: triangles cost half as much, products with the state the same, and the state's launch
holds all it needs in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_prefill import parts
from pallas_kernels.delta_prefill.inputs_kernel import AFTER, BEFORE, BETA, BLOCK, Inputs

# Bf16 parts of W (exact) and of M, which only outputs see; stored in this order.
W_PARTS, M_PARTS = 3, 2
# Factors of a block's tokens: e^G / |k|, e^G / |q| / sqrt(key_dim) and e^G.
READ_K, READ_Q, DECAY = range(3)


def block_matrices(
    inputs: Inputs, count: jax.Array, *, key_heads: int, key_dim: int, warps: int = 2, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """W and M as bf16 parts `[blocks, value_heads, 5, 32, 32]`, and factors float32 `[blocks, value_heads, 3, 32]`.

    count int32 `[1]`; blocks without a token are not written.
    """
    value_heads, tokens = inputs.gates.shape[1:]
    blocks = tokens // BLOCK
    out = [
        jax.ShapeDtypeStruct((blocks, value_heads, W_PARTS + M_PARTS, BLOCK, BLOCK), jnp.bfloat16),
        jax.ShapeDtypeStruct((blocks, value_heads, 3, BLOCK), jnp.float32),
    ]
    operands = (inputs.mixed, inputs.lengths, inputs.gates, count)
    return launch.launch(
        functools.partial(_kernel, key_heads=key_heads, key_dim=key_dim, value_heads=value_heads),
        name="delta_prefill_blocks",
        grid=(value_heads, blocks),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=[launch.whole(o) for o in out],
        out_shape=out,
        num_warps=warps,
        num_stages=1,
        interpret=interpret,
    )(*operands)


def _kernel(
    mixed_ref: Any,
    length_ref: Any,
    gate_ref: Any,
    count_ref: Any,
    matrix_ref: Any,
    factor_ref: Any,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
) -> None:
    """W, M and the factors of one block of one value head, by the formulas above."""
    head, block = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(block * BLOCK, BLOCK)
    q_head = head // (value_heads // key_heads)
    k_head = key_heads + q_head

    @pl.when(block * BLOCK < launch.load(count_ref, 0))
    def _block() -> None:
        # G and beta of the block's tokens, its raw q and k, and 1 / |q| / sqrt(key_dim) and 1 / |k|.
        before, beta = (launch.load(gate_ref, (kind, head, rows)) for kind in (BEFORE, BETA))
        q, k = (launch.load(mixed_ref, (rows, pl.ds(which * key_dim, key_dim))) for which in (q_head, k_head))
        q_length, k_length = (launch.load(length_ref, (which, rows)) for which in (q_head, k_head))
        q_length *= key_dim**-0.5
        # D, with the columns' 1 / |k| in it.
        row, column = _row_column()
        # Masked before exp: above the diagonal the difference may overflow.
        decay = jnp.exp(jnp.where(row >= column, before[:, None] - before[None], -jnp.inf)) * k_length[None]

        # T from A, then W and M, split into bf16 parts for the products with R.
        inverse = unit_lower_inverse(launch.dot(k, k.T) * decay * (beta * k_length)[:, None])
        t = inverse * beta[None]
        written = jnp.exp(launch.load(gate_ref, (AFTER, head, rows))) * k_length
        p = launch.dot(q, k.T) * decay * q_length[:, None]
        m = parts.dot(parts.split(p, M_PARTS), parts.split(t, M_PARTS))
        for i, part in enumerate(parts.split(t * written[:, None], W_PARTS) + parts.split(m, M_PARTS)):
            launch.store(matrix_ref, (block, head, i, slice(None), slice(None)), part)

        # What scales reads of S by row, and S itself from block to block.
        grown = jnp.exp(before)
        for kind, factor in ((READ_K, grown * k_length), (READ_Q, grown * q_length), (DECAY, grown)):
            launch.store(factor_ref, (block, head, kind, slice(None)), factor)


def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + strict_lower(a))^-1, a `[32, 32]` float32; what it holds on and above the diagonal does not matter.

    Inverses of the diagonal blocks are doubled in size: [[P, 0], [C, Q]]^-1 = [[P', 0], [-Q' C P', Q']]. Powers of a are
    never formed: for repeated keys they explode while the inverse stays near 1.
    """
    row, column = _row_column()

    def corner(level: Any) -> jax.Array:
        """The lower-left quarters of the diagonal blocks of 2^(level + 1), of a."""
        inside = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        return jnp.where(inside, a, 0.0)

    def double(level: Any, inverse: jax.Array) -> jax.Array:
        outer = parts.split(inverse, 3)
        inner = parts.dot(parts.split(corner(level), 3), outer)
        return inverse - parts.dot(outer, parts.split(inner, 3))

    # Blocks of two need no product. The rest is a loop, to be compiled once.
    return jax.lax.fori_loop(1, BLOCK.bit_length() - 1, double, jnp.where(row == column, 1.0, 0.0) - corner(0))


def _row_column() -> tuple[jax.Array, jax.Array]:
    shape = (BLOCK, BLOCK)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
