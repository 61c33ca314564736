"""Third launch: the state from block to block, for every value head and 64 of its value dims.

Everything is transposed, so that the value dims are the rows of each product: S^T, (K S)^T, R^T and (W R)^T. A warp then
owns 16 value dims of all of them, and the result of one product is the left operand of the next without leaving its
registers. k, q, W and M are the right operands, shared by the warps; S stays in registers from the first block to the last.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_prefill import parts
from pallas_kernels.delta_prefill.chunk_kernel import DECAY, M_PARTS, READ_K, READ_Q, W_PARTS
from pallas_kernels.delta_prefill.inputs_kernel import BLOCK


@dataclasses.dataclass(frozen=True)
class Config:
    """Value dims a block of threads owns, key dims of one product with the state, warps, depth of the loads that run ahead."""

    columns: int = 64
    keys: int = 32
    warps: int = 4
    stages: int = 3


def advance(
    mixed: jax.Array,
    matrices: jax.Array,
    factors: jax.Array,
    recurrent: jax.Array,
    slot: jax.Array,
    count: jax.Array,
    *,
    key_heads: int,
    config: Config = Config(),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of the delta rule before the gated norm, float32 `[value_heads * value_dim, tokens]`, and `recurrent`
    `[slots, value_heads, key_dim, value_dim]` with the slot's state advanced in place.

    mixed from `token_inputs`, matrices and factors from `block_matrices`; slot, count int32 `[1]`. Outputs of blocks without
    a token are not written.
    """
    _, value_heads, _, value_dim = recurrent.shape
    out = [
        jax.ShapeDtypeStruct((value_heads * value_dim, mixed.shape[0]), jnp.float32),
        jax.ShapeDtypeStruct(recurrent.shape, recurrent.dtype),
    ]
    operands = (mixed, matrices, factors, recurrent, slot, count)
    return launch.launch(
        functools.partial(_kernel, key_heads=key_heads, config=config),
        name="delta_prefill_state",
        grid=(value_dim // config.columns, value_heads),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=[launch.whole(o) for o in out],
        out_shape=out,
        num_warps=config.warps,
        num_stages=config.stages,
        aliases={3: 1},
        interpret=interpret,
    )(*operands)


def _kernel(
    mixed_ref: Any,
    matrix_ref: Any,
    factor_ref: Any,
    old_ref: Any,
    slot_ref: Any,
    count_ref: Any,
    out_ref: Any,
    new_ref: Any,
    *,
    key_heads: int,
    config: Config,
) -> None:
    """All blocks of tokens, in order, for some value dims of one head."""
    _, value_heads, key_dim, value_dim = old_ref.shape
    head = pl.program_id(1)
    at = pl.program_id(0) * config.columns
    key_head = head // (value_heads // key_heads)
    slot, count = launch.load(slot_ref, 0), launch.load(count_ref, 0)
    values = pl.ds(2 * key_heads * key_dim + head * value_dim + at, config.columns)
    slices = [i * config.keys for i in range(key_dim // config.keys)]

    def where(start: int) -> tuple[Any, ...]:
        return slot, head, pl.ds(start, config.keys), pl.ds(at, config.columns)

    def step(n: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = pl.ds(n * BLOCK, BLOCK)

        def keys(which: Any) -> list[jax.Array]:
            return [launch.load(mixed_ref, (rows, pl.ds(which * key_dim + start, config.keys))) for start in slices]

        def matrix(first: int, count: int) -> list[jax.Array]:
            return [launch.load(matrix_ref, (n, head, first + i, slice(None), slice(None))).T for i in range(count)]

        def factor(kind: int) -> jax.Array:
            return launch.load(factor_ref, (n, head, kind, slice(None)))[None]

        # (K S)^T and (Q S)^T, a slice of key dims at a time. S counts with three bf16 parts for k, which feeds the state, and
        # with two for q, which only outputs see.
        q, k = keys(key_head), keys(key_heads + key_head)
        read_k = read_q = None
        for s, q_part, k_part in zip(state, q, k, strict=True):
            s = parts.split(s, 3)
            read_k = parts.dot(s, [k_part.T], read_k)
            read_q = parts.dot(s[:2], [q_part.T], read_q)
        assert read_k is not None and read_q is not None  # a head has a slice of keys at least
        # R^T = V^T - e^G (K S)^T, and the outputs e^G (Q S)^T + (M R)^T.
        v = launch.load(mixed_ref, (rows, values)).T.astype(jnp.float32)
        r = parts.split(v - read_k * factor(READ_K), 3)
        out = parts.dot(r[:M_PARTS], matrix(W_PARTS, M_PARTS), read_q * factor(READ_Q))
        launch.store(out_ref, (pl.ds(head * value_dim + at, config.columns), rows), out)
        # S^T <- e^G_end S^T + (W R)^T K, slice by slice.
        written = parts.split(parts.dot(r, matrix(0, W_PARTS)), 3)
        shrink = launch.load(factor_ref, (n, head, DECAY, BLOCK - 1))
        return tuple(parts.dot(written, [k_part], s * shrink) for s, k_part in zip(state, k, strict=True))

    # The state of the slot is read once, and written once after the last block.
    state = tuple(launch.load(old_ref, where(start)).T for start in slices)
    # Blocks of padding alone are left out: they would change nothing but the sign of a zero.
    state = jax.lax.fori_loop(0, (count + BLOCK - 1) // BLOCK, step, state)
    for start, s in zip(slices, state, strict=True):
        launch.store(new_ref, where(start), s.T)
