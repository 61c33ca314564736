"""Small modules shared by the layers. Parameters are described first and filled from a checkpoint later.

A module's attribute path is the tensor's canonical name in the checkpoint, `layers.3.self_attn.o_proj.weight`, unless
several tensors share a parameter (`Linear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.checkpoints import Stored
from ninfer_jax.config import Recipe, WeightFormat
from pallas_kernels import embedding, launch
from pallas_kernels.matmul import (
    DECODE_ROWS,
    PAIR_ROWS,
    QuantisedWeight,
    cpu_norm,
    linear,
    quantised,
    quantised_linear,
    quantised_linear_pair,
)
from pallas_kernels.norms import rms_norm


class Weight(nnx.Param):
    """A parameter with the role that quantisation recipes and memory plans go by."""


def describe(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    role: str,
    parts: tuple[tuple[str, int], ...] | None = None,
    stored: Stored | None = None,
    columns: int = 0,
) -> Weight:
    """A parameter without data: a `jax.ShapeDtypeStruct`, to be replaced by an array when a checkpoint is read.

    parts: the modules whose tensors lie in it one after another, and their rows. stored: how it is quantised, where it is
    one of the arrays of a quantised parameter; columns: of the tensors then.
    """
    return Weight(jax.ShapeDtypeStruct(shape, dtype), role=role, parts=parts, stored=stored, columns=columns)


class Embedding(nnx.Module):
    """Rows of `[vocab, hidden]`, no scale; quantised where the recipe says so."""

    codes: Weight
    scales: Weight

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype, recipe: Recipe | None = None):
        self.format = recipe and recipe.formats.get("embed")
        if self.format is None:
            self.weight = describe((vocab, hidden), dtype, "embed")
        else:
            rows = embedding.structure(vocab, hidden, bits=self.format.bits, group=self.format.group)
            stored = Stored("rows", self.format.bits, self.format.group)
            for field in stored.fields:
                array = getattr(rows, field)
                setattr(self, field, describe(array.shape, array.dtype, "embed", (("", vocab),), stored, hidden))

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """int32 `[tokens]` -> `[tokens, hidden]` in `dtype`."""
        if self.format is None:
            return self.weight[...][tokens].astype(dtype)
        rows = embedding.QuantisedRows(self.codes[...], self.scales[...], self.format.bits, self.format.group)
        return embedding.lookup(rows, tokens, dtype)


class RMSNorm(nnx.Module):
    """Zero-centred RMS norm over the last axis, see `norms.rms_norm`."""

    def __init__(self, size: int, eps: float, recipe: Recipe | None = None):
        self.eps = eps
        # Quantised projections take the norm before them as a prologue, in bfloat16 as checkpoints store it.
        self.weight = describe((size,), jnp.float32 if recipe is None else jnp.bfloat16, "norm")

    def __call__(self, x: jax.Array) -> jax.Array:
        few = cpu_norm if x.ndim == 2 and x.shape[0] <= DECODE_ROWS else None
        return launch.by_platform(x, self.weight[...], xla=partial(rms_norm, eps=self.eps), cpu=few and partial(few, eps=self.eps))


class Linear(nnx.Module):
    """y = x W^T without bias, with what surrounds a projection in this model; weight `[out, in]`.

    outputs: columns of y, or the projections of one input that share the weight, by their names in checkpoints, with
    their columns: one product, and on a GPU one launch, instead of several.
    """

    def __init__(self, n_in: int, outputs: int | Mapping[str, int], dtype: jnp.dtype, role: str):
        n_out, parts = _columns(outputs)
        self.weight = describe((n_out, n_in), dtype, role, parts)

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
        swiglu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """x `[tokens, in]`, normed first by `norm`; swiglu: the columns are gate | up, the result is silu(gate) up;
        residual: added to the result."""
        prologue = {} if norm is None else {"norm": norm.weight[...], "eps": norm.eps}
        return linear(x, self.weight[...], residual=residual, swiglu=swiglu, out_dtype=out_dtype, **prologue)


def _columns(outputs: int | Mapping[str, int]) -> tuple[int, tuple[tuple[str, int], ...] | None]:
    """Columns of a projection's result in all, and of each of its parts where it has some."""
    return (outputs, None) if isinstance(outputs, int) else (sum(outputs.values()), tuple(outputs.items()))


class QuantisedLinear(nnx.Module):
    """The same with a weight of 4 or 8 bits, everything in one launch on a GPU; arguments as for `Linear`."""

    words: Weight
    scales: Weight
    unit: Weight

    def __init__(self, n_in: int, outputs: int | Mapping[str, int], dtype: jnp.dtype, role: str, format: WeightFormat):
        n_out, parts = _columns(outputs)
        self.format, self.shape, self._parts, self._role = format, (n_in, n_out), parts, role
        self._describe()

    def reformat(self, format: WeightFormat) -> None:
        """Describe the weight again, in another format, before it is filled."""
        self.format = format
        self._describe()

    def _describe(self) -> None:
        format, (n_in, n_out), parts, role = self.format, self.shape, self._parts, self._role
        described, stored = (
            quantised.structure(n_in, n_out, format.bits, format.group),
            Stored("matrix", format.bits, format.group),
        )
        for field in stored.fields:
            array = getattr(described, field)
            setattr(self, field, describe(array.shape, array.dtype, role, parts or (("", n_out),), stored, n_in))

    @property
    def quantised(self) -> QuantisedWeight:
        return QuantisedWeight(self.words[...], self.scales[...], self.unit[...], self.format.bits, self.format.group, self.shape)

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
        swiglu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        prologue = {} if norm is None else {"norm": norm.weight[...], "eps": norm.eps}
        activations = self.format.activations if x.shape[0] > DECODE_ROWS else "bf16"
        return quantised_linear(
            x, self.quantised, residual=residual, swiglu=swiglu, activations=activations, out_dtype=out_dtype or x.dtype, **prologue
        )


def pair(
    wide: Linear | QuantisedLinear, narrow: Linear | QuantisedLinear, x: jax.Array, norm: RMSNorm
) -> tuple[jax.Array, jax.Array]:
    """`wide(x, norm=norm)` and `narrow(x, norm=norm)`; a decode step's rows in one launch where both are quantised."""
    if isinstance(wide, QuantisedLinear) and isinstance(narrow, QuantisedLinear) and x.shape[0] <= PAIR_ROWS:
        return quantised_linear_pair(x, wide.quantised, narrow.quantised, norm=norm.weight[...], eps=norm.eps, out_dtype=x.dtype)
    return wide(x, norm=norm), narrow(x, norm=norm)


def projection(
    n_in: int, outputs: int | Mapping[str, int], dtype: jnp.dtype, role: str, recipe: Recipe | None
) -> Linear | QuantisedLinear:
    """A projection in the format that the recipe has for its role."""
    format = recipe and recipe.formats.get(role)
    return Linear(n_in, outputs, dtype, role) if format is None else QuantisedLinear(n_in, outputs, dtype, role, format)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, dtype: jnp.dtype, role: str, recipe: Recipe | None):
        self.gate_up_proj = projection(hidden, {"gate_proj": inner, "up_proj": inner}, dtype, role, recipe)
        self.down_proj = projection(inner, hidden, dtype, role, recipe)

    def __call__(self, h: jax.Array, norm: RMSNorm) -> jax.Array:
        """h `[tokens, hidden]` plus the MLP of its norm."""
        return self.down_proj(self.gate_up_proj(h, norm=norm, swiglu=True), residual=h)
