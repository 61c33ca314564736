"""A CPU's cases: of an op that has one for a GPU, its shapes with float32 activations and another call; or of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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


@dataclasses.dataclass(frozen=True)
class CpuCase:
    """One call of an op that a GPU leaves to XLA. form: the CPU kernel; twin: the reference, of the same arguments, `structs`.
    Each byte of arguments and results counts once."""

    op: str
    name: str
    form: Callable[..., Any]
    twin: Callable[..., Any]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    multiply_adds: int = 0
    allowed_error: float = 1e-5
    draw: Callable[[jax.Array], list[Any]] | None = None  # arguments where normal numbers will not do

    on_cpu = True

    @property
    def ideal_bytes(self) -> int:
        """Bytes of arguments and results."""
        results = jax.tree.leaves(jax.eval_shape(self.twin, *self.structs))
        return sum(a.size * a.dtype.itemsize for a in (*self.structs, *results))

    @property
    def weight_bytes(self) -> int:
        """`ideal_bytes`: such an op has no weights that would count apart."""
        return self.ideal_bytes

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        return list(self.structs)

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`."""
        if self.draw is not None:
            return self.draw(key)
        keys = jax.random.split(key, len(self.structs))
        return [jax.random.normal(k, s.shape, jnp.float32).astype(s.dtype) for k, s in zip(keys, self.structs, strict=True)]

    def call(self, *arguments: Any, interpret: bool = False) -> Any:
        """The kernel, compiled by LLVM."""
        if interpret:
            raise ValueError(f"{self.op}/{self.name}: a CPU kernel is compiled, not interpreted")
        return self.form(*arguments)

    def reference(self, *arguments: Any) -> Any:
        """The result in plain jnp."""
        return self.twin(*arguments)

    def tensor_ops(self) -> int:
        """None."""
        return 0


def _wide(dtype: Any) -> Any:
    return jnp.float32 if dtype == jnp.bfloat16 else dtype
