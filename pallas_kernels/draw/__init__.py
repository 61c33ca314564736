"""From sorted logits to the one that is drawn, and the logarithm of a softmax's denominator: the sums of a draw.

On a CPU each sum has one order, by rank or by column, so that a row is drawn alike whatever the number of rows and slots.
"""

from __future__ import annotations

import jax

from pallas_kernels import launch
from pallas_kernels.draw import cpu, reference

__all__ = ["draw_sorted", "log_total"]


def draw_sorted(
    values: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, uniform: jax.Array, *, impl: str = "auto"
) -> jax.Array:
    """The rank that each row draws, int32 `[slots, rows]`.

    values float32 `[slots, rows, n]`: logits over the temperature, less the largest of them, falling. Of their softmax over the
    first top_k (int32 `[slots]`; 0: all) stay those before which less than top_p lies and that are at least min_p times the
    first one (float32 `[slots]`); the first one always stays. uniform float32 `[slots, rows]` in [0, 1) is the share of what
    stays that lies before the drawn one.

    impl: `auto` is XLA; `cpu` is compiled by LLVM.
    """
    slots, rows, _ = values.shape
    for name, array, want in (
        ("top_k", top_k, (slots,)),
        ("top_p", top_p, (slots,)),
        ("min_p", min_p, (slots,)),
        ("uniform", uniform, (slots, rows)),
    ):
        if array.shape != want:
            raise ValueError(f"draw_sorted: {name} {array.shape} must be {want}")
    return launch.by_platform(values, top_k, top_p, min_p, uniform, xla=reference.draw_sorted, cpu=cpu.draw_sorted, impl=impl)


def log_total(logits: jax.Array, *, impl: str = "auto") -> jax.Array:
    """log(sum(exp(x))) over the last axis of float32 `[..., n]`, whose largest is finite; what is -inf counts nothing.

    impl: as for `draw_sorted`.
    """
    return launch.by_platform(logits, xla=reference.log_total, cpu=cpu.log_total, impl=impl)
