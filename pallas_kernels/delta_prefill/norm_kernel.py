"""Last launch: the gated norm over a head's value dims."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_prefill.parts import round_bf16


@dataclasses.dataclass(frozen=True)
class Config:
    """Tokens a block norms, of one head, and its warps."""

    tokens: int = 32
    warps: int = 4


def gated_norm(
    out: jax.Array,
    projected: jax.Array,
    norm: jax.Array,
    count: jax.Array,
    *,
    eps: float,
    config: Config = Config(),
    interpret: bool = False,
) -> jax.Array:
    """out / sqrt(mean(out^2) + eps) over each head, rounded to projected's type, * norm * SiLU(z).

    out float32 `[value_heads * value_dim, tokens]`; projected's last columns are z; norm float32 `[value_dim]`, count int32
    `[1]`. Returns projected's type, `[tokens, value_heads * value_dim]`, zeros from token `count` on.
    """
    width, tokens = out.shape
    dim = norm.shape[0]
    operands = (out, projected, norm, count)
    result = jax.ShapeDtypeStruct((tokens, width), projected.dtype)
    return launch.launch(
        functools.partial(_kernel, eps=eps, config=config, interpret=interpret),
        name="delta_prefill_norm",
        grid=(width // dim, tokens // config.tokens),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=launch.whole(result),
        out_shape=result,
        num_warps=config.warps,
        num_stages=1,
        interpret=interpret,
    )(*operands)


def _kernel(
    out_ref: Any, projected_ref: Any, norm_ref: Any, count_ref: Any, result_ref: Any, *, eps: float, config: Config, interpret: bool
) -> None:
    """Some tokens of one head; `out` comes transposed from the state's launch."""
    dim, width = norm_ref.shape[0], out_ref.shape[0]
    head, start = pl.program_id(0), pl.program_id(1) * config.tokens
    rows, columns = pl.ds(start, config.tokens), pl.ds(head * dim, dim)
    valid = start + jax.lax.broadcasted_iota(jnp.int32, (config.tokens, dim), 0) < launch.load(count_ref, 0)
    # Masked after loading: a mask along the contiguous axis would break up the loads.
    x = jnp.where(valid, launch.load(out_ref, (columns, rows)).T, 0.0)
    gates = pl.ds(projected_ref.shape[1] - width + head * dim, dim)
    z = launch.load(projected_ref, (rows, gates), valid).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(x * x, axis=1) * (1 / dim) + eps)
    # The rounding in the middle is the model's: in bf16 it decides the last bit.
    normed = round_bf16(x * scale[:, None], interpret).astype(jnp.float32) * launch.load(norm_ref, slice(None))[None]
    launch.store(result_ref, (rows, columns), normed * jax.nn.silu(z))
