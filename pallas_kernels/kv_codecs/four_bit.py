"""The two 4-bit codes: plain int4 (`rk4v4`) and the E8 lattice in the same 32 bits per octet (`rk4v4-e8`).

Both store an octet of dims as one uint32. Nibble i, at bits 4i, belongs to dim i and holds n_i + 8 with n_i in [-8, 7]. The
offset form is the cheapest to decode: `(word >> 4i & 15) << 19 | 0x41800000` are the bits of the float32 24 + n_i, with no
integer-to-float conversion.

int4: value = scale * n_i.

E8: value = scale * (n_i + c / 2), one coset bit c per octet, sum of n_i even. These are 2 * 16^8 / 2 = 2^32 points of the
E8 lattice, so they fill the word exactly. The parity of n_7 follows from the other seven, so its lowest bit (bit 28) is
free and holds c. Decoding takes the parity of the seven other low bits back into bit 28; 2 n_i + c fits in 5 bits.

A value has at most 8 significant bits (3 or 4 of the code without its sign, times 4 of the scale): it is exact in bfloat16.

The encoder works in fixed point, 2^12 per code step, from the scaled values on. Integer sums do not depend on the order of
summation nor on fused multiply-adds, so a vector gets the same bits alone or among thousands.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kv_codecs.constants import COST_SHIFT, FREE_BIT, LIMIT, ONE, OTHER_LOW_BITS
from pallas_kernels.kv_codecs.formats import SCALE_GROUP, WORD_DIMS
from pallas_kernels.kv_codecs.scale_byte import candidate_bytes, decode_scales


def _fixed_point(groups: Array, scales: Array) -> Array:
    """`groups / scales` in 2^-12 steps, int32, for groups `[..., 32]` and scales `[...]`."""
    steps = groups * (ONE / scales)[..., None]
    return jnp.round(jnp.clip(steps, -LIMIT, LIMIT)).astype(jnp.int32)


def _round_int4(steps: Array) -> tuple[Array, Array]:
    """Nearest int4 code of each fixed-point value `[..., 32]`, and the squared error `[...]` in 2^-20 squared steps."""
    codes = jnp.clip((steps + ONE // 2) >> 12, -8, 7)
    miss = steps - codes * ONE
    return codes, jnp.sum((miss * miss) >> COST_SHIFT, -1)


def _nearest_e8(steps: Array) -> tuple[Array, Array, Array]:
    """Nearest E8 codeword of each octet of `steps [..., 8]`: codes n `[..., 8]`, coset bit `[...]`, squared error `[...]`.

    The error is in 2^-24 squared steps. In either coset each n_i is rounded and clipped on its own. If their sum is odd,
    exactly one must move by one (moving three costs more), and the cheapest is taken. At the ends of the range a code can
    only move inwards, even if its value lies outside.
    """
    coset = jnp.arange(2)[:, None]
    target = steps[..., None, :] - coset * (ONE // 2)  # [..., coset, 8]
    codes = jnp.clip((target + ONE // 2) >> 12, -8, 7)
    miss = target - codes * ONE
    odd = jnp.sum(codes, -1) & 1
    move = jnp.where(codes == 7, -1, jnp.where(codes == -8, 1, jnp.where(miss >= 0, 1, -1)))
    # Moving by `move` adds 1 - 2 * move * miss to the squared error. The dim's index below the gain makes the maximum unique.
    gain = move * miss * WORD_DIMS + jnp.arange(WORD_DIMS)
    best_gain = gain.max(-1)
    codes = jnp.where((gain == best_gain[..., None]) & (odd == 1)[..., None], codes + move, codes)
    error = jnp.sum(miss * miss, -1) + odd * (ONE * ONE - 2 * ONE * (best_gain >> 3))
    use_half = error[..., 1] < error[..., 0]
    nearest = jnp.where(use_half[..., None], codes[..., 1, :], codes[..., 0, :])
    return nearest, use_half.astype(jnp.int32), error.min(-1)


def _octets(groups: Array) -> Array:
    return groups.reshape(*groups.shape[:-1], -1, WORD_DIMS)


def _group_error(steps: Array, lattice: bool) -> Array:
    """Squared error of each group `[..., 32]` of fixed-point values under its nearest codes, float32 `[...]` in 2^-20
    squared steps."""
    if lattice:
        return jnp.sum(_nearest_e8(_octets(steps))[2] >> COST_SHIFT, -1).astype(jnp.float32)
    return _round_int4(steps)[1].astype(jnp.float32)


def encode_four_bit(stored: Array, lattice: bool) -> tuple[Array, Array]:
    """Codes `[..., dims / 8]` uint32 and scale bytes `[..., dims / 32]` uint8 of float32 vectors `[..., dims]` in the
    stored (rotated) basis.

    `lattice` chooses the E8 code. Of three neighbouring scales each group keeps the one with the smallest squared error,
    the smallest scale on a tie.
    """
    groups = stored.reshape(*stored.shape[:-1], -1, SCALE_GROUP)
    candidates = candidate_bytes(groups)
    scales = decode_scales(candidates)
    errors = _group_error(_fixed_point(groups[..., None, :], scales), lattice) * (scales * scales)
    below, nearest, above = (errors[..., i] for i in range(3))
    scale_bytes = jnp.where(
        below <= jnp.minimum(nearest, above),
        candidates[..., 0],
        jnp.where(nearest <= above, candidates[..., 1], candidates[..., 2]),
    )
    steps = _fixed_point(groups, decode_scales(scale_bytes))
    if lattice:
        codes, coset, _ = _nearest_e8(_octets(steps))
        free_bit = coset.astype(jnp.uint32) << FREE_BIT
        words = (_pack(codes) & ~jnp.uint32(1 << FREE_BIT)) | free_bit
    else:
        words = _pack(_octets(_round_int4(steps)[0]))
    return words.reshape(*stored.shape[:-1], -1), scale_bytes


def _pack(codes: Array) -> Array:
    """uint32 words `[...]` of int32 codes `[..., 8]` in [-8, 7]."""
    return jnp.sum((codes + 8).astype(jnp.uint32) << _nibble_shifts(), -1, dtype=jnp.uint32)


def _nibble_shifts() -> Array:
    return jnp.arange(0, 32, 4, dtype=jnp.uint32)


def decode_four_bit(words: Array, scale_bytes: Array, lattice: bool) -> Array:
    """float32 `[..., dims]` in the stored basis from words `[..., dims / 8]` and scale bytes `[..., dims / 32]`."""
    half = jnp.uint32(0)
    if lattice:
        half = (words >> FREE_BIT) & 1
        parity = lax.population_count(words & OTHER_LOW_BITS) & 1
        words = (words & ~jnp.uint32(1 << FREE_BIT)) | (parity << FREE_BIT)
        half = half[..., None]
    doubled = (((words[..., None] >> _nibble_shifts()) & 15) * 2 + half).astype(jnp.int32) - 16
    codes = doubled.astype(jnp.float32) * 0.5
    dims = words.shape[-1] * WORD_DIMS
    groups = codes.reshape(*words.shape[:-1], dims // SCALE_GROUP, SCALE_GROUP)
    return (groups * decode_scales(scale_bytes)[..., None]).reshape(*words.shape[:-1], dims)
