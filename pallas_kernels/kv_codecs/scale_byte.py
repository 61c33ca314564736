"""The one-byte signed scale of the 4-bit formats: sign, 4 exponent bits, 3 mantissa bits.

    byte = s eeee mmm      scale = (-1)^s * 2^(e - 10) * (1 + m / 8)

All 256 bytes are ordinary numbers: magnitudes 2^-10 (0.00098) to 60 in 128 steps of 1/8 to 1/15 of themselves; no zero,
infinity, NaN or subnormal. As the largest element of a group sits on code -8, groups whose largest magnitude lies between
2^-7 (0.0078) and 480 are covered at full precision. Below that the step stays 2^-10 and errors stay within it; above it
values are clipped.

IEEE-like bytes are a worse fit. E4M3 turns subnormal under 2^-6, losing 2.3 dB on vectors of standard deviation 0.01, and
spends three exponents on scales up to 448. E5M2 has the range but one mantissa bit less, 0.36 dB. (Measured with the
`rk4v4` code, see docs/kv_formats.md.)
"""

import jax.numpy as jnp
from jax import Array, lax

# A scale byte is the top of a float32: shifting it by 20 puts `eeee mmm` on the float's exponent and mantissa, and adding
# 127 - 10 to the exponent re-biases it.
SHIFT = 20
REBIAS = (127 - 10) << 23


def decode_scales(scale_bytes: Array) -> Array:
    """Signed float32 scales of uint8 `scale_bytes`, same shape."""
    bits = scale_bytes.astype(jnp.uint32)
    return lax.bitcast_convert_type((((bits & 0x7F) << SHIFT) + REBIAS) | ((bits & 0x80) << 24), jnp.float32)


def nearest_magnitude(size: Array) -> Array:
    """Index of the representable magnitude nearest to float32 `size >= 0`, int32, not yet limited to [0, 127].

    Consecutive indices are consecutive magnitudes. An index outside [0, 127] says how far out of range the size is, so the
    neighbours of an index may be taken first and limited afterwards.
    """
    bits = lax.bitcast_convert_type(size, jnp.int32)
    return ((bits + (1 << (SHIFT - 1))) >> SHIFT) - (REBIAS >> SHIFT)


def candidate_bytes(groups: Array) -> Array:
    """Three scale bytes to try for each group: uint8 `[..., 3]` for float32 `groups [..., 32]`.

    The sign is the one that puts the element of largest magnitude on code -8, the magnitudes are the representable ones
    nearest to an eighth of that element, one below and one above. (Neighbours further out gain under 0.01 dB: measured in
    float64 on 4,096 Gaussian 256-vectors.) An all-zero group gets byte 0.
    """
    high, low = groups.max(-1), groups.min(-1)
    sign = jnp.where(high > -low, 0x80, 0)
    index = nearest_magnitude(jnp.maximum(high, -low) * 0.125)
    candidates = jnp.clip(index[..., None] + jnp.arange(-1, 2), 0, 127)
    return (candidates | sign[..., None]).astype(jnp.uint8)
