"""Numbers that the encoders agree on to the bit: the one in plain jnp and the one inside `kv_append`'s kernel."""

# The four-bit encoder works in fixed point, ONE to a code step. Scaled values are limited to +-10.5 steps: codes end at -8
# and 7.5 and unsaturated groups stay within 9.5, so this only touches values that are clipped anyway; it keeps the squared
# error of an octet, 8 * (3.5 * 2^12)^2, inside an int32.
ONE = 1 << 12
LIMIT = 10.5 * ONE
COST_SHIFT = 4  # squared errors are divided by 16 before 32 of them are added, again to fit an int32

FREE_BIT = 28  # where an E8 word keeps its coset: the lowest bit of nibble 7, which the parity of the others gives back
LOW_BITS = 0x11111111  # the lowest bit of every nibble of a word
OTHER_LOW_BITS = LOW_BITS & ~(1 << FREE_BIT)

LARGEST_CODE = 127  # of int8 codes: the largest magnitude of a group gets it, -128 is not used
LARGEST_FP16 = 65504.0  # int8 scales are float16
