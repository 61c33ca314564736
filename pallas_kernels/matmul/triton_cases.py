"""The decode projections of the 27B through `triton_kernel`: the cases of `cases`, launched the other way."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.matmul import cases, kernel, triton_kernel


@dataclasses.dataclass(frozen=True)
class TritonCase(cases.Case):
    """A decode case of `quantised_matmul`; call, sample, reference and limits mean the same."""

    op = "quantised_matmul_triton"

    def call(
        self, x: Any, weight: Any, norm: Any, residual: Any, interpret: bool = False, config: kernel.Config | None = None
    ) -> jax.Array:
        """The kernel alone."""
        return triton_kernel.decode(x, weight, norm, residual, swiglu=self.swiglu, config=config, interpret=interpret)

    def tensor_ops(self) -> int:
        """Those of the Pallas kernel, and for a norm the products x x^T `[16, 16]`: two m16n8k16 per 16 of K, shared by two
        warps, in every pair of warps of every block."""
        if not self.norm:
            return super().tensor_ops()
        config = kernel.default_config(self.out_columns, self.group, self.swiglu)
        blocks = -(-self.out_columns // config.columns)
        return super().tensor_ops() + -(-self.k // 16) * config.warps * blocks

    def configs(self) -> list[kernel.Config]:
        """None: block sizes are the defaults, on which `tensor_ops` depends."""
        return []

    def other_trips(self) -> tuple[int, ...]:
        """None: x is read once."""
        return ()


def _of(found: tuple[cases.Case, ...]) -> tuple[TritonCase, ...]:
    return tuple(
        TritonCase(**{f.name: getattr(c, f.name) for f in dataclasses.fields(c)})
        for c in found
        if c.decode and type(c) is cases.Case
    )


CASES = _of(cases.CASES)
SMALL = _of(cases.SMALL)
