"""KV-cache codecs against NumPy float64: stored bits, nearest codes by exhaustive search, signal-to-noise ratios, and bad input."""

from functools import partial

import collapsed_e8
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_codecs import (
    FORMATS,
    Packed,
    bytes_per_vector,
    check_format,
    decode,
    decode_stored,
    encode,
    packed_struct,
    rotate,
    uses_rotation,
)

HEAD_DIM = 256
CASES = [(format, part) for format in FORMATS for part in "kv"]
LAYOUTS = [("f32", "k"), ("bf16", "k"), ("int8", "k"), ("rk8v4", "k"), ("rk4v4", "v"), ("rk4v4-e8", "v")]  # each stored layout once
FOUR_BIT = ("rk4v4", "rk4v4-e8")

jit_encode = jax.jit(encode, static_argnames=("format", "part"))
jit_decode = jax.jit(decode, static_argnames=("format", "part"))
jit_rotate = jax.jit(rotate)
jit_decode_stored = jax.jit(decode_stored, static_argnames=("format", "part"))


def gaussian(*shape: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def db(original: np.ndarray, decoded: np.ndarray) -> float:
    original, decoded = np.float64(original), np.float64(decoded)
    return 10 * np.log10((original**2).sum() / ((original - decoded) ** 2).sum())


# --- Oracles, written from docs/kv_formats.md without the package ---


def magnitude_table() -> np.ndarray:
    return np.array([2.0 ** (exponent - 10) * (1 + mantissa / 8) for exponent in range(16) for mantissa in range(8)])


def scale_values(scale_bytes: np.ndarray) -> np.ndarray:
    return np.where(scale_bytes >> 7, -1.0, 1.0) * magnitude_table()[scale_bytes & 127]


def unpack_octets(words: np.ndarray, lattice: bool) -> np.ndarray:
    """Code values `[..., 8]` of uint32 words, one Python integer at a time."""
    values = []
    for word in words.ravel().tolist():
        nibbles = [word >> (4 * i) & 15 for i in range(8)]
        half = 0.0
        if lattice:
            half = (nibbles[7] & 1) / 2
            nibbles[7] = (nibbles[7] & 14) | (sum(nibbles[:7]) & 1)
        values.append([nibble - 8 + half for nibble in nibbles])
    return np.array(values).reshape(*words.shape, 8)


def pack_octets(codes: np.ndarray, coset: np.ndarray | None = None) -> np.ndarray:
    """uint32 words of integer codes `[..., 8]`; with `coset [...]`, E8 words."""
    words = ((codes.astype(np.int64) + 8) << (4 * np.arange(8))).sum(-1)
    if coset is not None:
        words = (words & ~(1 << 28)) | (coset.astype(np.int64) << 28)
    return words.astype(np.uint32)


def unpack(packed: Packed, lattice: bool) -> np.ndarray:
    codes = unpack_octets(np.asarray(packed.codes), lattice)
    groups = codes.reshape(*codes.shape[:-2], -1, 32)
    return (groups * scale_values(np.asarray(packed.scales))[..., None]).reshape(*codes.shape[:-2], -1)


def best_int4_error(steps: np.ndarray) -> np.ndarray:
    """Least squared error `[...]` of `steps [..., 8]` over all 16 codes of every dim."""
    return ((steps[..., None] - np.arange(-8, 8)) ** 2).min(-1).sum(-1)


def best_e8_error(steps: np.ndarray) -> np.ndarray:
    """Least squared error `[...]` of `steps [..., 8]` over all 2^32 codewords, by dynamic programming over the parity of the codes
    so far."""
    best = np.full(steps.shape[:-1], np.inf)
    for half in (0.0, 0.5):
        even, odd = np.zeros(steps.shape[:-1]), np.full(steps.shape[:-1], np.inf)
        for i in range(8):
            cost = (steps[..., i, None] - half - np.arange(-8, 8)) ** 2
            even_code, odd_code = cost[..., ::2].min(-1), cost[..., 1::2].min(-1)
            even, odd = np.minimum(even + even_code, odd + odd_code), np.minimum(even + odd_code, odd + even_code)
        best = np.minimum(best, even)
    return best


# --- Layout ---


@pytest.mark.parametrize(
    "format, k_bytes, v_bytes",
    [("f32", 1024, 1024), ("bf16", 512, 512), ("int8", 264, 264), ("rk8v4", 264, 136), ("rk4v4", 136, 136), ("rk4v4-e8", 136, 136)],
)
def test_bytes_per_vector(format, k_bytes, v_bytes):
    assert (bytes_per_vector(format, "k", HEAD_DIM), bytes_per_vector(format, "v", HEAD_DIM)) == (k_bytes, v_bytes)
    x = gaussian(8, HEAD_DIM)
    for part, size in (("k", k_bytes), ("v", v_bytes)):
        packed = jit_encode(x, format, part)
        assert packed.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) == 8 * size


@pytest.mark.parametrize("format, part", CASES)
def test_struct_describes_what_encode_returns(format, part):
    for leading, head_dim in (((), 64), ((5,), 128), ((2, 3, 4), HEAD_DIM)):
        struct = packed_struct(format, part, leading, head_dim)
        encoded = jax.eval_shape(
            partial(encode, format=format, part=part), jax.ShapeDtypeStruct((*leading, head_dim), jnp.bfloat16)
        )
        assert struct == encoded
        assert jax.eval_shape(partial(decode, format=format, part=part), struct) == jax.ShapeDtypeStruct(
            (*leading, head_dim), jnp.float32
        )
        assert struct.nbytes == bytes_per_vector(format, part, head_dim) * int(np.prod(leading))


@pytest.mark.bits
@pytest.mark.parametrize("format", FORMATS)
def test_tokens_can_be_written_into_a_donated_page_pool(format):
    pool = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), packed_struct(format, "v", (4, 2, 64), HEAD_DIM))

    @partial(jax.jit, donate_argnums=0)
    def append(pool, x, page, row):
        return jax.tree.map(lambda old, new: old.at[page, :, row].set(new), pool, encode(x, format, "v"))

    x = gaussian(2, HEAD_DIM)
    pool = append(pool, x, 3, 17)
    stored = jit_decode(jax.tree.map(lambda leaf: leaf[3, :, 17], pool), format, "v")
    np.testing.assert_array_equal(stored, jit_decode(jit_encode(x, format, "v"), format, "v"))


# --- Rotation ---


def test_rotation_is_the_hadamard_matrix_on_each_64_dims():
    x = gaussian(9, HEAD_DIM)
    matrix = collapsed_e8.hadamard(64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(64), atol=1e-15)
    rotated = np.asarray(jit_rotate(x))
    np.testing.assert_allclose(rotated, (np.float64(x).reshape(9, 4, 64) @ matrix).reshape(9, HEAD_DIM), atol=2e-6)
    np.testing.assert_allclose(jit_rotate(rotated), x, atol=2e-6)
    np.testing.assert_array_equal(jit_rotate(np.eye(64, dtype=np.float32)), matrix)


@pytest.mark.parametrize("format, part", LAYOUTS)
def test_attention_may_work_in_the_stored_basis(format, part):
    query, key = gaussian(8, HEAD_DIM, seed=1), jit_encode(gaussian(8, HEAD_DIM, seed=2), format, part)
    decoded, stored = np.float64(jit_decode(key, format, part)), np.float64(jit_decode_stored(key, format, part))
    stored_query = collapsed_e8.rotate64(query) if uses_rotation(format) else query
    np.testing.assert_allclose((stored_query * stored).sum(-1), (np.float64(query) * decoded).sum(-1), atol=1e-4)


# --- Stored bits ---


def test_every_scale_byte():
    scale_bytes = np.arange(256, dtype=np.uint8).reshape(128, 2)
    ones = pack_octets(np.ones((128, 8, 8), np.int64))
    decoded = np.asarray(jit_decode_stored(Packed(ones, scale_bytes), "rk4v4")).reshape(256, 32)
    np.testing.assert_array_equal(decoded, np.repeat(scale_values(np.arange(256))[:, None], 32, 1))
    assert (magnitude_table()[0], magnitude_table()[-1]) == (2.0**-10, 60.0)


def test_every_nibble_in_every_position():
    codes = np.zeros((16, 8, 8), np.int64)  # [value, position, dim]
    for value in range(16):
        codes[value, np.arange(8), np.arange(8)] = value - 8
    packed = Packed(pack_octets(codes), np.full((16, 2), 80, np.uint8))
    np.testing.assert_array_equal(jit_decode_stored(packed, "rk4v4"), codes.reshape(16, 64))


@pytest.mark.parametrize("format", FOUR_BIT)
def test_random_words_decode_as_documented(format):
    rng = np.random.default_rng(3)
    packed = Packed(rng.integers(0, 2**32, (64, 32), dtype=np.uint32), rng.integers(0, 256, (64, 8), dtype=np.uint8))
    decoded = np.asarray(jit_decode_stored(packed, format))
    np.testing.assert_array_equal(decoded, unpack(packed, format == "rk4v4-e8"))
    # No rounding is left for a bfloat16 matrix unit to add.
    np.testing.assert_array_equal(decoded, decoded.astype(jnp.bfloat16).astype(np.float32))


def test_every_word_is_an_e8_lattice_point():
    words = np.random.default_rng(4).integers(0, 2**32, (512, 8), dtype=np.uint32)
    points = np.asarray(jit_decode_stored(Packed(words, np.full((512, 2), 80, np.uint8)), "rk4v4-e8")).reshape(-1, 8)
    nearest, use_half = collapsed_e8.nearest_e8(points.astype(np.float64))
    np.testing.assert_array_equal(points, nearest)
    np.testing.assert_array_equal(use_half, words.ravel() >> 28 & 1)


@pytest.mark.parametrize("format", FOUR_BIT)
def test_code_bits_are_the_top_mantissa_bits(format):
    """The shortcut docs/kv_formats.md offers to kernels: mask, or, bitcast; no integer-to-float conversion."""
    words = np.random.default_rng(5).integers(0, 2**32, 1024, dtype=np.uint32)
    magic, nibbles = np.uint32(0x41800000), words
    if format == "rk4v4-e8":
        parity = (np.bitwise_count(words & np.uint32(0x01111111)) & 1).astype(np.uint32)
        magic = magic | (words >> 28 & 1) << 18
        nibbles = (words & ~np.uint32(1 << 28)) | parity << 28
    bits = np.stack([(nibbles >> 4 * i & 15) << 19 | magic for i in range(8)], -1).astype(np.uint32)
    np.testing.assert_array_equal(bits.view(np.float32) - 24, unpack_octets(words, format == "rk4v4-e8"))


@pytest.mark.bits
@pytest.mark.parametrize("format", FOUR_BIT)
def test_every_code_and_scale_byte_survives_decode_and_encode(format):
    """A group that uses code -8 names its scale, so encoding decoded bits must return exactly those bits."""
    rng = np.random.default_rng(6)
    codes = rng.integers(-8, 8, (4096, 4, 8))  # [group, octet, dim]
    coset = rng.integers(0, 2, (4096, 4)) if format == "rk4v4-e8" else None
    group = np.arange(4096)
    codes[group, 0, group % 8] = -8
    if coset is not None:
        coset[:, 0] = 0
        dim = (group + 1) % 8  # not the one that holds -8
        codes[group, :, dim] ^= codes.sum(-1) & 1
    scale_bytes = (group % 256).astype(np.uint8).reshape(64, 64)
    packed = Packed(pack_octets(codes, coset).reshape(64, 256), scale_bytes)
    again = jit_encode(jit_decode(packed, format), format)
    np.testing.assert_array_equal(again.scales, packed.scales)
    np.testing.assert_array_equal(again.codes, packed.codes)


# --- Nearest codes ---

ENCODER_INPUTS = {
    "gaussian": gaussian(24, HEAD_DIM),
    "heavy-tailed": np.random.default_rng(8).standard_t(3, (24, HEAD_DIM)).astype(np.float32),
    "small": gaussian(24, HEAD_DIM) * 3e-3,  # below the range of full precision
    "saturated": gaussian(24, HEAD_DIM) * 190,  # largest elements around 500 to 600, the last code at 480
}


@pytest.mark.parametrize("inputs", ENCODER_INPUTS)
@pytest.mark.parametrize("format", FOUR_BIT)
def test_encoder_against_exhaustive_search(format, inputs):
    x = ENCODER_INPUTS[inputs]
    lattice = format == "rk4v4-e8"
    best_error = best_e8_error if lattice else best_int4_error
    packed = jit_encode(x, format)
    groups = collapsed_e8.rotate64(x).reshape(-1, 4, 8)
    scales = scale_values(np.asarray(packed.scales)).reshape(-1, 1, 1)
    decoded = unpack(packed, lattice).reshape(groups.shape)

    # Codes: no codeword is nearer under the stored scale. The encoder rounds to 2^-12 of a step first, hence the tolerance
    # (in squared steps).
    error = (((groups - decoded) / scales) ** 2).sum(-1)
    least = best_error(groups / scales)
    assert (error >= least - 1e-4).all()
    assert (error <= least + 1e-3).all()

    # Scale: the best of the representable one nearest to the largest element / -8 and its two neighbours. Neighbours are
    # counted on a table that goes on beyond the byte's range, then limited to it.
    flat = groups.reshape(-1, 32)
    largest = flat[np.arange(len(flat)), np.abs(flat).argmax(1)]
    longer = np.concatenate([magnitude_table() / 2**16, magnitude_table(), magnitude_table() * 2**16])
    nearest = np.abs(np.abs(largest)[:, None] / 8 - longer).argmin(1) - 128
    totals = []
    for neighbour in (-1, 0, 1):
        candidate = (-np.sign(largest) * magnitude_table()[np.clip(nearest + neighbour, 0, 127)])[:, None, None]
        totals.append((best_error(groups / candidate) * candidate[..., 0] ** 2).sum(-1))
    chosen = ((groups - decoded) ** 2).sum((1, 2))
    np.testing.assert_allclose(chosen, np.min(totals, 0), rtol=2e-3)
    if inputs == "saturated":
        assert (np.abs(decoded) == 480).any() and (np.abs(flat) > 500).any()


def test_int8_codes_are_rounded_multiples_of_the_stored_scale():
    x = np.random.default_rng(9).standard_t(3, (32, HEAD_DIM)).astype(np.float32)
    for format, stored in (("int8", np.float64(x)), ("rk8v4", collapsed_e8.rotate64(x))):
        packed = jit_encode(x, format, "k")
        groups, scales = stored.reshape(32, 4, 64), np.float64(packed.scales)[..., None]
        np.testing.assert_allclose(scales, np.abs(groups).max(-1, keepdims=True) / 127, rtol=2.0**-11 * 1.001)
        codes = np.asarray(packed.codes).reshape(groups.shape)
        assert np.abs(codes - np.clip(groups / scales, -127, 127)).max() <= 0.5001
        np.testing.assert_array_equal(jit_decode_stored(packed, format, "k"), (codes * scales).reshape(x.shape))


def test_float_formats_only_round():
    x = gaussian(5, HEAD_DIM)
    np.testing.assert_array_equal(jit_decode(jit_encode(x, "f32"), "f32"), x)
    np.testing.assert_array_equal(jit_decode(jit_encode(x, "bf16"), "bf16"), x.astype(jnp.bfloat16).astype(np.float32))


# --- Quality: the table of docs/kv_formats.md ---


@pytest.fixture(scope="module")
def gaussian_vectors() -> np.ndarray:
    return gaussian(4096, HEAD_DIM)


@pytest.fixture(scope="module")
def heavy_vectors() -> np.ndarray:
    return np.random.default_rng(7).standard_t(3, (4096, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize(
    "format, part, gaussian_db, heavy_db",
    [
        ("bf16", "k", 55.59, 55.51),
        ("int8", "k", 44.54, 39.12),
        ("rk8v4", "k", 44.53, 45.33),
        ("rk4v4", "k", 21.57, 22.26),
        ("rk4v4-e8", "k", 21.99, 22.69),
    ],
)
def test_signal_to_noise(format, part, gaussian_db, heavy_db, gaussian_vectors, heavy_vectors):
    measured = [db(x, jit_decode(jit_encode(x, format, part), format, part)) for x in (gaussian_vectors, heavy_vectors)]
    np.testing.assert_allclose(measured, [gaussian_db, heavy_db], atol=0.01)
    floors = {"rk4v4": 21.4, "rk4v4-e8": 21.9}
    assert measured[0] >= floors.get(format, 40)


@pytest.mark.bits
@pytest.mark.parametrize(
    "one, other", [(("rk8v4", "v"), ("rk4v4", "v")), (("rk4v4", "k"), ("rk4v4", "v")), (("rk4v4-e8", "k"), ("rk4v4-e8", "v"))]
)
def test_layouts_shared_by_parts(one, other):
    x = gaussian(8, HEAD_DIM)
    jax.tree.map(np.testing.assert_array_equal, jit_encode(x, *one), jit_encode(x, *other))


def test_the_collapsed_code_is_worse_than_plain_int4(gaussian_vectors, heavy_vectors):
    rotated, heavy = collapsed_e8.rotate64(gaussian_vectors), collapsed_e8.rotate64(heavy_vectors)
    collapsed = collapsed_e8.collapsed_e8_keys(gaussian_vectors)
    assert abs(db(rotated, collapsed) - 15.7) <= 0.2
    assert abs(db(rotated, collapsed_e8.absmax_int4(gaussian_vectors)) - 19.36) <= 0.1
    assert abs(db(heavy, collapsed_e8.collapsed_e8_keys(heavy_vectors)) - 16.4) <= 0.2
    # Mean cosine of a 64-group, the figure the code is usually quoted with.
    a, b = rotated.reshape(-1, 64), collapsed.reshape(-1, 64)
    cosine = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    assert abs(cosine.mean() - 0.9868) <= 5e-4


# --- Extremes ---


@pytest.mark.parametrize("format, part", LAYOUTS)
def test_zeros_stay_zero(format, part):
    decoded = np.asarray(jit_decode(jit_encode(np.zeros((8, HEAD_DIM), np.float32), format, part), format, part))
    np.testing.assert_array_equal(decoded, 0)
    x = gaussian(8, HEAD_DIM)
    x[:, 64:128] = 0
    np.testing.assert_array_equal(np.asarray(jit_decode(jit_encode(x, format, part), format, part))[:, 64:128], 0)


@pytest.mark.parametrize("format", FOUR_BIT)
def test_tiny_and_huge_values_of_four_bit_codes(format):
    tiny = gaussian(8, HEAD_DIM) * 1e-6
    assert np.abs(np.asarray(jit_decode_stored(jit_encode(tiny, format), format))).max() == 0
    for size in (1e4, 1e30):
        huge = gaussian(8, HEAD_DIM) * np.float32(size)
        packed = jit_encode(huge, format)
        decoded, rotated = np.asarray(jit_decode_stored(packed, format)), collapsed_e8.rotate64(huge)
        assert (np.asarray(packed.scales) & 127 == 127).all()
        assert np.isfinite(decoded).all() and np.abs(decoded).max() == 480
        far = np.abs(rotated) > 480
        assert far.mean() > 0.9 and (np.sign(decoded) == np.sign(rotated))[far].all()
        # Codes -8 or 7; in the E8 code a half more, and one dim of an octet may have had to step inwards for the parity.
        assert np.abs(decoded[far]).min() >= (420 if format == "rk4v4" else 390)


@pytest.mark.parametrize("format, part", [("int8", "k"), ("int8", "v"), ("rk8v4", "k")])
def test_tiny_and_huge_values_of_int8_codes(format, part):
    def decoded(x):
        return np.asarray(jit_decode(jit_encode(x, format, part), format, part))

    tiny = gaussian(8, HEAD_DIM) * 1e-6
    assert np.abs(decoded(tiny) - tiny).max() < 4e-6
    without_scale = jit_encode(tiny * 1e-2, format, part)
    assert not np.any(without_scale.scales) and not np.any(without_scale.codes)
    assert db(gaussian(8, HEAD_DIM) * 1e4, decoded(gaussian(8, HEAD_DIM) * 1e4)) > 40
    clipped = jit_encode(np.full((8, HEAD_DIM), 1e9, np.float32), format, part)
    assert np.abs(np.asarray(jit_decode_stored(clipped, format, part))).max() == 65504 * 127


@pytest.mark.bits
@pytest.mark.parametrize("format, part", LAYOUTS)
def test_half_precision_input_is_widened_first(format, part):
    x = gaussian(8, HEAD_DIM).astype(jnp.bfloat16)
    direct, widened = jit_encode(x, format, part), jit_encode(x.astype(np.float32), format, part)
    jax.tree.map(np.testing.assert_array_equal, direct, widened)


@pytest.mark.bits
@pytest.mark.parametrize("format, part", LAYOUTS)
def test_a_vector_is_encoded_the_same_alone_and_among_others(format, part):
    x = gaussian(64, HEAD_DIM, seed=11)
    together = jit_encode(x, format, part)
    for rows in (1, 8):
        for start in (0, 31, 56):
            alone = jit_encode(x[start : start + rows], format, part)
            for got, all_of_them in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
                np.testing.assert_array_equal(got, all_of_them[start : start + rows])


# --- Bad input ---


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: check_format("q4_0"), "kv format 'q4_0' is unknown; known formats: f32, bf16, int8, rk8v4, rk4v4, rk4v4-e8"),
        (lambda: uses_rotation("RK4V4"), "kv format 'RK4V4' is unknown; known formats: f32, bf16, int8, rk8v4, rk4v4, rk4v4-e8"),
        (lambda: check_format("int8", 96), "head_dim 96 does not fit kv format 'int8': it must be a positive multiple of 64"),
        (
            lambda: encode(gaussian(2, 80), "rk4v4"),
            "head_dim 80 does not fit kv format 'rk4v4': it must be a positive multiple of 64",
        ),
        (
            lambda: packed_struct("f32", "k", (1,), 0),
            "head_dim 0 does not fit kv format 'f32': it must be a positive multiple of 64",
        ),
        (lambda: encode(gaussian(2, 64), "rk8v4", "values"), "kv part 'values' is unknown; known parts: k, v"),
        (lambda: encode(np.ones((2, 64), np.int32), "bf16"), "encode: x has dtype int32, it must be a float dtype"),
        (lambda: rotate(gaussian(2, 32)), "rotate: the last axis has 32 dims, it must be a positive multiple of 64"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
