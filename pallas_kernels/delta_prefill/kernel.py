"""A prefill chunk of the delta rule on a GPU: what tokens bring, what blocks need of themselves, the state, the norm.

Four launches and an update of the convolution's window in place. Only the third is sequential; it has as little to do as
the state's float32 precision allows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.delta_prefill import chunk_kernel, inputs_kernel, norm_kernel, state_kernel
from pallas_kernels.delta_rule import CHUNK


@dataclasses.dataclass(frozen=True)
class Config:
    """Block shapes of the launches that have a choice."""

    state: state_kernel.Config = state_kernel.Config()
    norm: norm_kernel.Config = norm_kernel.Config()


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def delta_prefill(
    projected: jax.Array,
    ab: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    taps: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    slot: jax.Array,
    count: jax.Array,
    *,
    eps: float,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`delta_prefill.delta_prefill` in four launches; its checks are relied on. projected and conv in bf16, key and value
    dims of one size, 64 or 128; slot and count within their bounds.

    Output rows from token `count` on are zeros. Cutting a sequence at multiples of 64 changes no bit of the states.
    """
    _, value_heads, key_dim, value_dim = recurrent.shape
    if projected.dtype != jnp.bfloat16 or conv.dtype != jnp.bfloat16:
        raise ValueError(f"delta_prefill: projected {projected.dtype} and conv {conv.dtype} must be bfloat16 on a GPU")
    if key_dim != value_dim or key_dim not in (64, 128):
        raise ValueError(f"delta_prefill: recurrent has head dims {key_dim} and {value_dim}; on a GPU both are 64 or both 128")
    if projected.shape[0] % CHUNK:
        raise ValueError(f"delta_prefill: projected has {projected.shape[0]} tokens, a multiple of {CHUNK} is needed")
    config = config or Config()
    key_heads = (conv.shape[2] - value_heads * value_dim) // (2 * key_dim)
    # Kernels read them from memory.
    slots, counts = (x.astype(jnp.int32).reshape(1) for x in (slot, count))
    inputs = inputs_kernel.token_inputs(
        projected, ab, conv, taps, a_log, dt_bias, slots, counts, key_heads=key_heads, dim=key_dim, interpret=interpret
    )
    matrices, factors = chunk_kernel.block_matrices(inputs, counts, key_heads=key_heads, key_dim=key_dim, interpret=interpret)
    out, recurrent = state_kernel.advance(
        inputs.mixed, matrices, factors, recurrent, slots, counts, key_heads=key_heads, config=config.state, interpret=interpret
    )
    out = norm_kernel.gated_norm(out, projected, norm, counts, eps=eps, config=config.norm, interpret=interpret)
    # Not in the first launch: its blocks still read the old window while others are done.
    return out, conv.at[slot, : taps.shape[2] - 1].set(inputs.window), recurrent
