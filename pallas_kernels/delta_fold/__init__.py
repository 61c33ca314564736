"""The accepted rows of a verify pass made permanent in a Gated DeltaNet layer's states."""

from __future__ import annotations

import jax

from pallas_kernels import launch
from pallas_kernels.delta_decode import unfit_heads
from pallas_kernels.delta_fold import kernel, reference
from pallas_kernels.delta_fold.reference import shift_window
from pallas_kernels.delta_rule import Transitions

__all__ = ["delta_fold", "shift_window"]


def delta_fold(
    recurrent: jax.Array, conv: jax.Array, transitions: Transitions, projected: jax.Array, accepted: jax.Array,
    zero: jax.Array, *, impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`recurrent` float32 `[slots, value_heads, key_dim, value_dim]` and `conv` `[slots, width - 1, channels]` after the
    first accepted[slot] (int32 `[slots]`, 0: untouched) rows that `delta_decode` recorded in `transitions` and read from
    `projected` `[slots * rows, ...]`. In place: donate both. The bits are those of folding one row at a time.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas` and `xla` insist. ValueError for shapes that do not fit.
    """
    slots = recurrent.shape[0]
    rows = transitions.beta.shape[1]
    for name, array, want in (
        ("accepted", accepted, (slots,)), ("conv", conv, (slots, *conv.shape[1:])),
        ("projected", projected, (slots * rows, projected.shape[-1])),
    ):  # fmt: skip
        if array.shape != want:
            raise ValueError(f"delta_fold: {name} {array.shape} must be {want}")

    def pallas(*a):
        return kernel.delta_fold(*a[:-1])

    arguments = (recurrent, conv, transitions, projected, accepted, zero)
    return launch.by_platform(*arguments, pallas=pallas, xla=reference.delta_fold, impl=impl, unfit=unfit_heads("delta_fold", recurrent))
