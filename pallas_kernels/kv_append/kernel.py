"""Attention inputs in one launch: q normed, turned and rotated; k and v encoded straight into their pages.

A block takes a few tokens of one head, a vector of `head_dim` numbers a row. Query heads end in `q`; key and value
heads go through the encoder into the pool, in place. Encoding has the bits of `kv_codecs.encode`: on the way from the
stored basis to codes nothing is left to the compiler's order of summation or contraction.

Values reach their partners (rotation, rotary pairs) through `_partner`: exactly, and without shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.kv_codecs import formats, uses_rotation
from pallas_kernels.kv_codecs.constants import COST_SHIFT, FREE_BIT, LARGEST_CODE, LARGEST_FP16, LIMIT, LOW_BITS, ONE
from pallas_kernels.kv_codecs.scale_byte import decode_scales, nearest_magnitude
from pallas_kernels.kv_pages import PAGE, KVPages

# 1.5 * 2^23: adding it to a float32 leaves the nearest integer in the low bits.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000


@dataclasses.dataclass(frozen=True)
class Config:
    """rows (tokens) of a block and its warps: one warp a row gives each thread eight neighbours of a 256-vector."""

    rows: int = 4
    warps: int = 4


@functools.partial(jax.jit, static_argnames=("format", "eps", "config", "interpret"))
def attention_inputs(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    *,
    format: str,
    eps: float,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]:
    """`kv_append.attention_inputs` in one launch; its checks are relied on. Donate the pool, or it is copied.

    ValueError where head_dim or the number of rotary pairs is not a power of two.
    """
    config = config or Config()
    shape = _shape(projected, cos, pool, table, format, eps, config, interpret)
    leaves, tree = jax.tree.flatten(pool)
    operands = [projected, q_norm, k_norm, cos, sin, table, positions, *leaves]
    outs = [jax.ShapeDtypeStruct((shape.tokens, shape.query_heads, shape.dims), jnp.float32)]
    outs += [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    q, *leaves = launch.launch(
        functools.partial(_kernel, shape=shape, tree=tree),
        name=f"kv_append_{format.replace('-', '_')}",
        grid=(shape.query_heads + 2 * shape.kv_heads, -(-shape.tokens // config.rows)),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=[launch.whole(a) for a in outs],
        out_shape=outs,
        num_warps=config.warps,
        num_stages=1,
        aliases={len(operands) - len(leaves) + i: 1 + i for i in range(len(leaves))},
        interpret=interpret,
    )(*operands)
    return q, jax.tree.unflatten(tree, leaves)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts the kernel body needs."""

    tokens: int
    query_heads: int
    kv_heads: int
    dims: int
    half: int  # rotary pairs
    pages: int  # of a slot
    format: str
    eps: float
    rows: int
    interpret: bool

    def column(self, head: Any) -> Any:
        """The column of `projected` at which a head's vector starts; a query is followed by its gate."""
        behind_gates = (head + self.query_heads) * self.dims
        return jnp.where(head < self.query_heads, 2 * head * self.dims, behind_gates)


def _shape(
    projected: jax.Array, cos: jax.Array, pool: KVPages, table: jax.Array, format: str, eps: float, config: Config, interpret: bool
) -> Shape:
    kv_heads = pool.k.codes.shape[1]
    dims = pool.k.codes.shape[-1] * formats.layout_of(format, "k").dims_per_code
    tokens, half = cos.shape
    for name, size in (("head_dim", dims), ("rotary pairs", half)):
        if not launch.is_power_of_two(size):
            raise ValueError(f"pool and cos: {name} {size} must be a power of two for this kernel")
    query_heads = (projected.shape[1] // dims - 2 * kv_heads) // 2
    return Shape(tokens, query_heads, kv_heads, dims, half, table.shape[-1], format, eps, config.rows, interpret)


def _kernel(*refs: Any, shape: Shape, tree: Any) -> None:
    """A few tokens of one head: of a query head into q, of a key or value head into the pool."""
    projected, q_norm, k_norm, cos, sin, table, positions, *rest = refs
    q_ref, *leaves = rest[tree.num_leaves :]  # the pool's inputs are its outputs
    pool = jax.tree.unflatten(tree, leaves)
    head = pl.program_id(0)
    row = pl.program_id(1) * shape.rows + jnp.arange(shape.rows)
    inside = row < shape.tokens
    is_query = head < shape.query_heads
    is_key = jnp.logical_not(is_query) & (head < shape.query_heads + shape.kv_heads)

    # Every block goes a key's way, norm and rotary embedding; then a query is scaled, and a value is the raw numbers again.
    dim = jax.lax.broadcasted_iota(jnp.int32, (shape.rows, shape.dims), 1)
    raw = launch.load(projected, (row[:, None], shape.column(head) + dim), inside[:, None])
    x = _normed(raw, q_norm, k_norm, is_query, is_key, shape)
    x = _turned(x, raw.dtype, cos, sin, row, inside & (is_query | is_key), shape)
    x = jnp.where(is_query, x * shape.dims**-0.5, jnp.where(is_key, x, raw.astype(jnp.float32)))
    if uses_rotation(shape.format):
        x = rotate(x)

    @pl.when(is_query)
    def _() -> None:
        launch.store(q_ref, (row[:, None], head, dim), x, inside[:, None])

    @pl.when(jnp.logical_not(is_query))
    def _() -> None:
        page, offset = _place(table, positions, row, inside, shape)
        # One encoder serves both where K and V are stored alike.
        kinds = [formats.layout_of(shape.format, part).kind for part in formats.PARTS]
        encode = functools.partial(encode_block, x, interpret=shape.interpret)
        both = encode(kinds[0]) if kinds[0] == kinds[1] else None

        @pl.when(is_key)
        def _() -> None:
            _write(pool.k, both or encode(kinds[0]), page, head - shape.query_heads, offset, inside)

        @pl.when(jnp.logical_not(is_key))
        def _() -> None:
            kv_head = head - shape.query_heads - shape.kv_heads
            _write(pool.v, both or encode(kinds[1]), page, kv_head, offset, inside)


def _normed(raw: jax.Array, q_norm: Any, k_norm: Any, is_query: Any, is_key: Any, shape: Shape) -> jax.Array:
    """raw `[rows, dims]` * rsqrt(mean square + eps) * (1 + the head's weight), rounded to raw's dtype, as float32."""
    x = raw.astype(jnp.float32)
    # Only one of the two is read, neither for a value.
    weights = [
        launch.load(ref, pl.ds(0, shape.dims), jnp.broadcast_to(used, (shape.dims,)))
        for ref, used in ((q_norm, is_query), (k_norm, is_key))
    ]
    factor = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / shape.dims + shape.eps)
    return _rounded(x * factor * (1 + (weights[0] + weights[1]))[None], raw.dtype)


def _turned(x: jax.Array, dtype: Any, cos: Any, sin: Any, row: jax.Array, used: jax.Array, shape: Shape) -> jax.Array:
    """Rotary embedding of x `[rows, dims]`: pairs (i, i + half) of the leading dims, rounded to dtype once."""
    dim = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    paired = dim < 2 * shape.half
    pair = (row[:, None], jax.lax.rem(dim, shape.half))
    c, s = (launch.load(ref, pair, paired & used[:, None]).astype(jnp.float32) for ref in (cos, sin))
    turned = x * c + _partner(x, shape.half) * _negated(s, dim < shape.half)
    return jnp.where(paired, _rounded(turned, dtype), x)


def _write(
    part: formats.Packed, encoded: tuple[jax.Array, ...], page: jax.Array, head: Any, offset: jax.Array, inside: jax.Array
) -> None:
    """Codes and scales `[rows, ...]` into their pages."""
    for ref, value in zip(jax.tree.leaves(part), encoded, strict=True):
        if ref.dtype == jnp.uint16:  # the words of bfloat16 codes
            value = jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16)
        code = jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)
        launch.store(ref, (page[:, None], head, offset[:, None], code), value, inside[:, None])


def _place(table: Any, positions: Any, row: jax.Array, inside: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each row; page 0, which nobody reads, for positions outside the slot's table."""
    position = launch.load(positions, row, inside, -1)
    known = (position >= 0) & (position < shape.pages * PAGE)
    position = jnp.where(known, position, 0)
    index = position // PAGE
    page = launch.load(table, (index,) if len(table.shape) == 1 else (row, index), known)
    return page, position % PAGE


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x as float32, rounded to `dtype` on the way."""
    return x.astype(dtype).astype(jnp.float32)


def _partner(x: jax.Array, stride: int) -> jax.Array:
    """The other element of each pair of x `[rows, dims]` float32: `stride` dims further in a pair's first half, or back in
    its second.

    The sum of both bit patterns less one's own, as wrapping integers: exact. Within a thread it compiles to nothing.
    """
    # An axis of length 1 would make the compiler leave the threads' own elements.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32).reshape((-1, 2, stride) if stride > 1 else (-1, 2))
    other = jnp.sum(bits, axis=1, keepdims=True, dtype=jnp.int32) - bits
    return jax.lax.bitcast_convert_type(other, jnp.float32).reshape(x.shape)


def rotate(x: jax.Array) -> jax.Array:
    """`kv_codecs.rotate` of x `[rows, dims]` float32, with its very sums: six levels of butterflies per 64 dims."""
    dim = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    for stride in (1, 2, 4, 8, 16, 32):
        x = _partner(x, stride) + _negated(x, dim & stride != 0)
    return x * 0.125


def _negated(x: jax.Array, where: jax.Array) -> jax.Array:
    """-x where `where`, by its sign bit: the compiler would subtract from zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) ^ jnp.where(where, jnp.int32(-(1 << 31)), 0)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def encode_block(x: jax.Array, kind: str, interpret: bool) -> tuple[jax.Array, ...]:
    """Codes and scales `[rows, ...]` of x `[rows, dims]` float32 in the stored basis, in a page's dtypes."""
    if kind == "float":
        return (x,)
    return _encode_int8(x, interpret) if kind == "int8" else _encode_four_bit(x, kind == "e8", interpret)


def _nearest_integer(x: jax.Array) -> jax.Array:
    """int32 nearest to x, ties to even, for |x| < 2^22."""
    return jax.lax.bitcast_convert_type(x + _ROUND, jnp.int32) - _ROUND_BITS


def _reciprocal(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / x rounded to nearest; plain division compiles to an approximation."""
    return launch.packed("rcp.rn.f32 $0, $1;", lambda x: 1 / x, x, dtype=jnp.float32, interpret=interpret, pack=1)


def _encode_int8(x: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """int8 codes `[rows, dims]` and float16 scales `[rows, dims / 64]`, with the bits of `kv_codecs`."""
    groups = x.reshape(x.shape[0], -1, formats.ROTATION_GROUP)
    scales = jnp.minimum(jnp.max(jnp.abs(groups), -1) * (1 / LARGEST_CODE), LARGEST_FP16).astype(jnp.float16)
    scale = scales.astype(jnp.float32)
    # By the scale as it is stored. A group of zeros, or nearly, has scale 0 and codes 0.
    inverse = jnp.where(scale > 0, _reciprocal(jnp.where(scale > 0, scale, 1), interpret), 0)
    codes = _nearest_integer(jnp.clip(groups * inverse[..., None], -LARGEST_CODE, LARGEST_CODE))
    return codes.astype(jnp.int8).reshape(x.shape), scales


def _encode_four_bit(x: jax.Array, lattice: bool, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Words uint32 `[rows, dims / 8]` and scale bytes uint8 `[rows, dims / 32]`: of three neighbouring scales each group keeps
    the one with the smallest squared error, the smallest scale on a tie."""
    groups = x.reshape(x.shape[0], -1, formats.SCALE_GROUP)
    high, low = jnp.max(groups, -1), jnp.min(groups, -1)
    # The largest element goes to code -8, which has no positive twin: the scale takes its sign and an eighth of its size.
    sign = jnp.where(high > -low, 0x80, 0)
    index = nearest_magnitude(jnp.maximum(high, -low) * 0.125)
    best = None
    for neighbour in (-1, 0, 1):
        byte = jnp.clip(index + neighbour, 0, 127) | sign
        scale = decode_scales(byte)
        # In fixed point from here on: integer sums come out the same in any order.
        steps = jnp.clip(groups * (ONE * _reciprocal(scale, interpret))[..., None], -LIMIT, LIMIT)
        octets = _nearest_integer(steps).reshape(*groups.shape[:2], -1, formats.WORD_DIMS)
        words, cost = (_nearest_e8 if lattice else _nearest_int4)(octets)
        error = jnp.sum(cost, -1).astype(jnp.float32) * (scale * scale)
        if best is None:
            best = error, byte, words
        else:
            better = error < best[0]
            best = tuple(_select(better, new, old) for new, old in zip((error, byte, words), best, strict=True))
    _, byte, words = best
    return words.reshape(x.shape[0], -1).astype(jnp.uint32), byte.astype(jnp.uint8)


def _select(choose: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """new where `choose` holds for its group, else old."""
    return jnp.where(choose if new.ndim == choose.ndim else choose[..., None], new, old)


def _lane(octets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, octets.shape, octets.ndim - 1)


def _round_codes(target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Nearest codes in [-8, 7] of fixed-point `target [..., 8]`, what they miss, and the codes' words `[...]`."""
    codes = jnp.clip((target + ONE // 2) >> 12, -8, 7)
    words = jnp.sum((codes + 8) << (4 * _lane(codes)), -1, dtype=jnp.int32)
    return codes, target - codes * ONE, words


def _nearest_int4(octets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words `[...]` of fixed-point octets `[..., 8]` and their squared errors in 2^-20 squared steps."""
    _, miss, words = _round_codes(octets)
    return words, jnp.sum((miss * miss) >> COST_SHIFT, -1, dtype=jnp.int32)


def _nearest_e8(octets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words and squared errors of the nearest E8 codewords, as `_nearest_int4`; kv_codecs.four_bit explains the search."""
    found = []
    for coset in (0, 1):
        # Every dim to its own nearest code of this coset, and the direction in which its second nearest lies.
        codes, miss, words = _round_codes(octets - coset * (ONE // 2))
        up = ((miss >= 0) & (codes != 7)) | (codes == -8)
        # What a move by one gains, and below it the dim and the direction: the maximum is unique and tells all.
        gain = jnp.where(up, miss, -miss) * 16 + _lane(codes) * 2 + up.astype(jnp.int32)
        best = jnp.max(gain, -1)
        # If the codes' sum is odd, the dim that loses least moves by one, as an addition to its nibble of the word.
        odd = jax.lax.population_count(words & LOW_BITS) & 1
        move = ((best & 1) * 2 - 1) << ((best >> 1 & 7) * 4)
        words = (words + odd * move) & ~(1 << FREE_BIT) | coset << FREE_BIT
        # (miss - 1)^2 = miss^2 + 1 - 2 miss, in steps.
        error = jnp.sum(miss * miss, -1, dtype=jnp.int32) + odd * (ONE * ONE - 2 * ONE * (best >> 4))
        found.append((words, error))
    # The nearer of the two cosets; the integer one on a tie.
    (words, error), (half_words, half_error) = found
    words = jnp.where(half_error < error, half_words, words)
    return words, jnp.minimum(error, half_error) >> COST_SHIFT
