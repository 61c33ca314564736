"""A Gated DeltaNet layer's states brought up to date: what waits in the records of `delta_decode` enters them."""

from __future__ import annotations

import jax

from pallas_kernels import launch
from pallas_kernels.delta_decode import check_rings, unfit_heads
from pallas_kernels.delta_fold import cpu, kernel, reference

__all__ = ["delta_fold"]


def delta_fold(
    recurrent: jax.Array,
    conv: jax.Array,
    records: jax.Array,
    start: jax.Array,
    count: jax.Array,
    zero: jax.Array,
    *,
    width: int,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` and `conv` with nothing waiting: after the count[slot] rows that `delta_decode` left in `records`, and with
    the window (width - 1 raw inputs) in the first rows of its ring, as start 0 and count 0 say. The arguments are those of
    `delta_decode`; a negative count leaves a slot as it is. In place: donate the
    first two. The bits are those of decoding one row at a time.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas`, `cpu` (compiled by LLVM) and `xla` insist. ValueError for
    shapes that do not fit.
    """
    check_rings("delta_fold", recurrent, conv, records, start, count, rows=1, width=width)

    def pallas(*a):
        return kernel.delta_fold(*a[:-1], width=width)

    def compiled(*a):
        return cpu.delta_fold(*a[:-1], width=width)

    def xla(*a):
        return reference.delta_fold(*a, width=width)

    arguments = (recurrent, conv, records, start, count, zero)
    unfit = {"pallas": unfit_heads("delta_fold", recurrent), "cpu": cpu.unfit("delta_fold", *recurrent.shape[2:])}
    return launch.by_platform(*arguments, pallas=pallas, cpu=compiled, xla=xla, impl=impl, unfit=unfit)
