"""The orthonormal Hadamard rotation applied to each 64 dims before the `rk*` codes; it spreads outlier channels over their
group.

H64 is Sylvester's matrix, symmetric and its own inverse. Four pieces of code apply it, each where the numbers lie: `rotate`
here, to arrays; `kv_append.kernel.rotate`, by butterflies between a warp's registers, with the very sums of this one;
`decode_attention.merge`, as signs of a sum over one vector; `prefill_attention.pages`, as a matrix for tensor cores."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.kv_codecs.formats import ROTATION_GROUP


def _walsh8(x: Array, axis: int) -> Array:
    """Unnormalised 8-point Walsh-Hadamard transform (Sylvester order) along a negative `axis` of length 8."""
    parts = [jnp.squeeze(part, axis) for part in jnp.split(x, 8, axis)]
    for step in (1, 2, 4):
        parts = [parts[i] + parts[i + step] if not i & step else parts[i - step] - parts[i] for i in range(8)]
    return jnp.stack(parts, axis)


def hadamard(row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Entries of H64, float32: -1 to the number of bits that `row` and `column` (integers 0..63) share, over 8."""
    shared = row & column
    parity = sum((shared >> bit for bit in range(6)), np.zeros_like(shared)) & 1
    return (0.125 - 0.25 * parity).astype(np.float32)


def rotate(x: Array) -> Array:
    """`H64 @ x` on every 64 consecutive dims of `x [..., dims]`, as float32; its own inverse.

    H64 is the Sylvester-Hadamard matrix over 8, so lengths and inner products are kept. It is written as two radix-8 stages
    of additions rather than a matmul: a matmul would run in TF32 on the GPU, and its summation order could change with the
    number of rows. The one product, with 1/8, is exact. ValueError if `dims` is not a multiple of 64.
    """
    dims = x.shape[-1]
    if dims == 0 or dims % ROTATION_GROUP:
        raise ValueError(f"rotate: the last axis has {dims} dims, it must be a positive multiple of {ROTATION_GROUP}")
    # H64 is the Kronecker product of two H8, so the group is a square of 8 x 8 transformed along both sides.
    square = x.astype(jnp.float32).reshape(*x.shape[:-1], dims // ROTATION_GROUP, 8, 8)
    return (_walsh8(_walsh8(square, -1), -2) * 0.125).reshape(x.shape)
