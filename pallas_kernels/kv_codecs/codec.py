"""Encoding and decoding K and V vectors for the cache, in plain jnp; see formats.py for the stored shapes."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_codecs.constants import LARGEST_CODE, LARGEST_FP16
from pallas_kernels.kv_codecs.formats import ROTATION_GROUP, Packed, layout_of
from pallas_kernels.kv_codecs.four_bit import decode_four_bit, encode_four_bit
from pallas_kernels.kv_codecs.rotation import rotate


def encode(x: Array, format: str, part: str = "k") -> Packed:
    """Encodes finite vectors `x [..., head_dim]` of any float dtype.

    `part` is "k" or "v"; it matters for `rk8v4`, whose V is stored as in `rk4v4`. A vector's bits do not depend on the
    other vectors in `x`. Magnitudes beyond a format's range are clipped, never turned into NaN. ValueError for an unknown
    format or part, a head_dim that is not a multiple of 64, or integers.
    """
    layout = layout_of(format, part, x.shape[-1])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"encode: x has dtype {x.dtype}, it must be a float dtype")
    if layout.kind == "float":
        return Packed(x.astype(layout.code_dtype))
    stored = rotate(x) if layout.rotated else x.astype(jnp.float32)
    if layout.kind == "int8":
        return Packed(*_encode_int8(stored))
    return Packed(*encode_four_bit(stored, lattice=layout.kind == "e8"))


def decode_stored(packed: Packed, format: str, part: str = "k") -> Array:
    """float32 `[..., head_dim]` in the basis the format stores: rotated where `uses_rotation(format)`.

    The rotation keeps inner products, so attention may rotate Q, use these K and V, and rotate its output back, which costs
    far less than rotating every cached vector.
    """
    kind = layout_of(format, part).kind
    if kind == "float":
        return packed.codes.astype(jnp.float32)
    if kind == "int8":
        return _decode_int8(packed.codes, packed.scales)
    return decode_four_bit(packed.codes, packed.scales, lattice=kind == "e8")


def decode(packed: Packed, format: str, part: str = "k") -> Array:
    """float32 `[..., head_dim]` in the basis of the vectors that were encoded."""
    stored = decode_stored(packed, format, part)
    return rotate(stored) if layout_of(format, part).rotated else stored


def _encode_int8(stored: Array) -> tuple[Array, Array]:
    """Codes in [-127, 127] and one float16 scale, largest magnitude / 127, per 64 dims."""
    groups = stored.reshape(*stored.shape[:-1], -1, ROTATION_GROUP)
    largest = jnp.max(jnp.abs(groups), -1)
    scales = jnp.minimum(largest * (1 / LARGEST_CODE), LARGEST_FP16).astype(jnp.float16)
    # Codes use the scale as stored. It is zero under about 3.8e-6 (half the smallest float16 times 127); so are the codes then.
    scale = scales.astype(jnp.float32)
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    codes = jnp.clip(jnp.round(groups * inverse[..., None]), -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8)
    return codes.reshape(stored.shape), scales


def _decode_int8(codes: Array, scales: Array) -> Array:
    groups = codes.astype(jnp.float32).reshape(*codes.shape[:-1], -1, ROTATION_GROUP)
    return (groups * scales.astype(jnp.float32)[..., None]).reshape(codes.shape)
