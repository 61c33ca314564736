"""A prefill chunk through the delta rule in four launches: inputs, blocks, state, norm."""

from __future__ import annotations

import dataclasses
import functools

import jax

from pallas_kernels.delta_prefill import chunk_kernel, inputs_kernel, norm_kernel, state_kernel


@dataclasses.dataclass(frozen=True)
class Config:
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
    config: Config = Config(),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, value_heads, key_dim, value_dim = recurrent.shape
    key_heads = (conv.shape[2] - value_heads * value_dim) // (2 * key_dim)
    slot_, count = slot.reshape(1), count.reshape(1)
    inputs = inputs_kernel.token_inputs(
        projected, ab, conv, taps, a_log, dt_bias, slot_, count, key_heads=key_heads, dim=key_dim, interpret=interpret
    )
    matrices, factors = chunk_kernel.block_matrices(
        inputs, count, key_heads=key_heads, key_dim=key_dim, interpret=interpret
    )
    out, recurrent = state_kernel.advance(
        inputs.mixed, matrices, factors, recurrent, slot_, count, key_heads=key_heads, config=config.state, interpret=interpret
    )
    out = norm_kernel.gated_norm(out, projected, norm, count, eps=eps, config=config.norm, interpret=interpret)
    return out, conv.at[slot].set(inputs.window), recurrent
