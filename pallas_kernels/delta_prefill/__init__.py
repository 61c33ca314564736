"""Gated DeltaNet between its projections, for a prefill chunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.delta_decode import check_delta
from pallas_kernels.delta_prefill import kernel, reference
from pallas_kernels.delta_rule import CHUNK

__all__ = ["delta_prefill"]


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
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A chunk of one slot's tokens through convolution, gates, delta rule (chunked form) and gated norm.

    projected `[tokens, channels + value_heads * value_dim]` and ab `[tokens, 2 * value_heads]`, tokens a multiple of 64;
    the other arrays as for `delta_decode`, conv and recurrent of all slots (donate them: only slot's part is read and
    rewritten, in place), of conv the first width - 1 rows: nothing may wait in the slot, see `delta_fold`. slot, count
    int32 scalars: the first `count` tokens are valid, the others leave the states as they are and their results are finite.
    Returns `[tokens, value_heads * value_dim]` in projected's dtype, ready for the output projection, and the new conv and
    recurrent.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas` and `xla` insist. ValueError for shapes that do not fit.
    """
    check_delta("delta_prefill", projected, ab, conv, recurrent, taps, a_log, dt_bias, norm)
    if projected.shape[0] % CHUNK:
        raise ValueError(f"delta_prefill: projected has {projected.shape[0]} tokens, a multiple of {CHUNK} is needed")

    def by(op):
        return lambda *a: op(*a, eps=eps)

    arguments = (projected, ab, conv, recurrent, taps, a_log, dt_bias, norm, slot, count)
    pallas, xla = by(kernel.delta_prefill), by(reference.delta_prefill)
    key_dim, value_dim = recurrent.shape[2:]
    unfit = ""
    if key_dim != value_dim or key_dim not in (64, 128) or projected.dtype != jnp.bfloat16:
        given = f"key_dim {key_dim}, value_dim {value_dim}, {projected.dtype}"
        unfit = f"delta_prefill: {given}: the kernel takes 64 or 128 for both, in bfloat16"
    return launch.by_platform(*arguments, pallas=pallas, xla=xla, impl=impl, unfit=unfit)
