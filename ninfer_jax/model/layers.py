"""Small modules shared by the layers. Parameters are described first and filled from a checkpoint later.

A module's attribute path is the tensor's canonical name in the checkpoint: `layers.3.self_attn.q_proj.weight`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.matmul import linear


class Weight(nnx.Param):
    """A parameter with the role that quantisation recipes and memory plans go by."""


def describe(shape: tuple[int, ...], dtype: jnp.dtype, role: str) -> Weight:
    """A parameter without data: a `jax.ShapeDtypeStruct`, to be replaced by an array when a checkpoint is read."""
    return Weight(jax.ShapeDtypeStruct(shape, dtype), role=role)


class Linear(nnx.Module):
    """y = x W^T without bias; weight `[out, in]` as checkpoints store it."""

    def __init__(self, n_in: int, n_out: int, dtype: jnp.dtype, role: str):
        self.weight = describe((n_out, n_in), dtype, role)

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        return linear(x, self.weight[...], out_dtype=out_dtype)


class Embedding(nnx.Module):
    """Rows of `[vocab, hidden]`, no scale."""

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype):
        self.weight = describe((vocab, hidden), dtype, "embed")

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self.weight[...][tokens].astype(dtype)


class RMSNorm(nnx.Module):
    """Zero-centred RMS norm over the last axis: x * rsqrt(mean(x^2) + eps) * (1 + w), float32 with one cast at the end."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = describe((size,), jnp.float32, "norm")

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * (1.0 + self.weight[...])).astype(x.dtype)


class GatedNorm(nnx.Module):
    """The delta rule's output norm: plain weight, then times SiLU of the gate. Weight `[value_dim]`, shared by heads."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = describe((size,), jnp.float32, "norm")

    def __call__(self, x: jax.Array, gate: jax.Array, dtype: jnp.dtype) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        # The cast in the middle is the reference's: in bfloat16 it decides the last bit.
        normed = (x * scale).astype(dtype).astype(jnp.float32) * self.weight[...]
        return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, dtype: jnp.dtype, role: str):
        self.gate_proj = Linear(hidden, inner, dtype, role)
        self.up_proj = Linear(hidden, inner, dtype, role)
        self.down_proj = Linear(inner, hidden, dtype, role)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
