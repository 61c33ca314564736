"""Float32 products on bf16 tensor cores: numbers as sums of bf16 parts.

The first 8 significant bits of a float32, the next 8 and the last 8 are three bf16 numbers whose sum is that float32
exactly. What was bf16 to begin with (q, k and v after the convolution) is one part. So a product of float32 with bf16
is three tensor-core products and of float32 with float32 six, each exact but for the float32 sums; TF32 would need four
and six times the time of one bf16 product for 22 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import launch

_UPPER_HALF = -65536  # 0xFFFF0000


def split(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """float32 x as `count` bf16 parts, the largest first. Three are x exactly (no part below 1e-38), two leave 2^-16 of it."""
    parts = []
    for _ in range(count - 1):
        # Cut off by bits: compilers may take a conversion there and back for nothing.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_UPPER_HALF)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return (*parts, x.astype(jnp.bfloat16))


def dot(a: Sequence[jax.Array], b: Sequence[jax.Array], start: jax.Array | None = None) -> jax.Array:
    """start + the matrix product of sums of parts, float32. Pairs of parts below the last bit kept are left out."""
    # Part by part of b, so that only one of them is held in registers; the smallest first.
    pairs = [(i, j) for j in reversed(range(len(b))) for i in reversed(range(len(a))) if i + j < max(len(a), len(b))]
    (i, j), *rest = pairs
    one = launch.dot(a[i], b[j])
    total = one if start is None else start + one
    for i, j in rest:
        total = total + launch.dot(a[i], b[j])
    return total


def dots(a: int, b: int) -> int:
    """Tensor-core products that `dot` makes of `a` parts times `b` parts."""
    depth = max(a, b)
    return sum(i + j < depth for i in range(a) for j in range(b))


def round_bf16(x: jax.Array, interpret: bool) -> jax.Array:
    """x rounded to bf16. Interpreted, XLA would drop a rounding that is followed by a conversion back."""
    if interpret:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.bfloat16)
