"""A CPU's case of an op that has one for a GPU: its shapes, with float32 activations, and another call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class OnCpu:
    """Before a `Case` among a class's bases; the class says `run(*arguments)`, the CPU kernel's call."""

    on_cpu = True
    itemsize = 4  # of an activation
    op: str
    name: str
    run: Any

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        case: Any = super()
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, _wide(s.dtype)), case.arguments())

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`."""
        case: Any = super()
        return jax.tree.map(lambda a: a.astype(_wide(a.dtype)), case.sample(key))

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        """The kernel, compiled by LLVM."""
        if interpret:
            raise ValueError(f"{self.op}/{self.name}: a CPU kernel is compiled, not interpreted")
        return self.run(*arguments)


def _wide(dtype: Any) -> Any:
    return jnp.float32 if dtype == jnp.bfloat16 else dtype
