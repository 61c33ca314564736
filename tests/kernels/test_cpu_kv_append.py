"""Attention's inputs by the CPU kernel: numbers against float64, stored bits against the codecs, and what pages keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_append import attention_inputs
from pallas_kernels.kv_codecs import FORMATS, encode
from pallas_kernels.kv_pages import PAGE, KVPages, pages_struct

EPS = 1e-6
PAGES, PER_SLOT = 9, 4


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes: head_dim `dims`, `half` rotary pairs."""

    query: int = 3
    kv: int = 1
    dims: int = 192
    half: int = 24
    dtype: str = "float32"

    @property
    def width(self):
        return 2 * (self.query + self.kv) * self.dims


ODD = Heads()
REAL = Heads(query=24, kv=4, dims=256, half=32)


def draw(heads, tokens, seed=0):
    """projected, q_norm, k_norm, cos, sin, table, positions: every token in a page of its own slot or of the next token's."""
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 2 * np.pi, (tokens, heads.half))
    table = np.stack([rng.permutation(np.arange(1, PAGES))[:PER_SLOT] for _ in range(tokens)]).astype(np.int32)
    positions = np.arange(tokens, dtype=np.int32) * 37 % (PER_SLOT * PAGE)
    return [
        rng.normal(size=(tokens, heads.width)).astype(heads.dtype),
        (0.2 * rng.normal(size=heads.dims)).astype(np.float32),
        (0.2 * rng.normal(size=heads.dims)).astype(np.float32),
        np.cos(angles).astype(heads.dtype),
        np.sin(angles).astype(heads.dtype),
        table,
        positions,
    ]


def worst_pool(heads, format):
    """A pool of random bytes, the same for all calls."""
    rng = np.random.default_rng(9)

    def leaf(struct):
        raw = rng.integers(0, 256, (*struct.shape, struct.dtype.itemsize), np.uint8)
        return raw.view(struct.dtype).reshape(struct.shape)

    return jax.tree.map(leaf, pages_struct(format, PAGES, heads.kv, heads.dims))


@functools.partial(jax.jit, static_argnames="format", donate_argnums=0)
def _run(pool, arguments, format):
    *inputs, table, positions = arguments
    return attention_inputs(*inputs, pool, table, positions, format=format, eps=EPS, impl="cpu")


def run(heads, arguments, format):
    """q, and the pool that was random bytes before."""
    q, pool = _run(jax.tree.map(jnp.array, worst_pool(heads, format)), arguments, format)
    return np.array(q), jax.tree.map(np.array, pool)


jit_encode = jax.jit(encode, static_argnames=("format", "part"))


def places(arguments):
    """Page and row of every token."""
    table, positions = arguments[5:]
    return table[np.arange(len(positions)), positions // PAGE], positions % PAGE


def exact(heads, arguments):
    """q (scaled, not rotated), k and v `[tokens, heads, dims]`, float64."""
    projected, q_norm, k_norm, cos, sin = (np.float64(a) for a in arguments[:5])
    vectors = projected.reshape(len(projected), -1, heads.dims)
    q, k, v = vectors[:, : 2 * heads.query : 2], vectors[:, 2 * heads.query : -heads.kv], vectors[:, -heads.kv :]

    def turned(x, weight):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 + weight)
        z = (x[..., : heads.half] + 1j * x[..., heads.half : 2 * heads.half]) * (cos + 1j * sin)[:, None]
        return np.concatenate([z.real, z.imag, x[..., 2 * heads.half :]], -1)

    return turned(q, q_norm) / np.sqrt(heads.dims), turned(k, k_norm), v


def hadamard(x):
    i = np.arange(64)
    signs = np.array([[(-1.0) ** (a & b).bit_count() for b in i.tolist()] for a in i.tolist()]) / 8
    return (x.reshape(*x.shape[:-1], -1, 64) @ signs).reshape(x.shape)


def same(got, want):
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


@pytest.mark.parametrize(
    "heads", [ODD, REAL, Heads(dims=64, half=8, kv=2), Heads(dims=64, half=3)], ids=lambda h: f"{h.dims}-{h.half}"
)
def test_equals_float64(heads):
    """Of 2^-24: the squares' chains and halves, root, quotient, three products and a sum, on numbers of up to 6."""
    arguments = draw(heads, 5)
    q, k, v = exact(heads, arguments)
    page, row = places(arguments)
    got, pool = run(heads, arguments, "f32")
    tolerance = 6 * (heads.dims // 16 + 12) * 2**-24
    assert np.abs(got - q).max() <= tolerance / np.sqrt(heads.dims)
    assert np.abs(pool.k.codes[page, :, row] - k).max() <= tolerance
    same(pool.v.codes[page, :, row], v.astype(np.float32))
    rotated, _ = run(heads, arguments, "rk4v4")
    assert np.abs(rotated - hadamard(q)).max() <= 8 * tolerance / np.sqrt(heads.dims)


@pytest.mark.parametrize("format", FORMATS)
def test_pages_hold_the_codes_of_their_format(format):
    """The bits of `encode` for the keys and values that the f32 format stores; no other byte of the pool changes."""
    heads = ODD
    arguments = draw(heads, 7, seed=1)
    page, row = places(arguments)
    _, plain = run(heads, arguments, "f32")
    _, pool = run(heads, arguments, format)
    want = worst_pool(heads, format)
    for part, stored, codes in (("k", want.k, plain.k.codes), ("v", want.v, plain.v.codes)):
        encoded = jax.tree.map(np.asarray, jit_encode(jnp.asarray(codes[page, :, row]), format, part))
        for target, leaf in zip(jax.tree.leaves(stored), jax.tree.leaves(encoded), strict=True):
            target[page, :, row] = leaf.view(target.dtype)
    for got, expected in zip(jax.tree.leaves(pool), jax.tree.leaves(want), strict=True):
        same(got, expected)


@pytest.mark.parametrize("format", ["int8", "rk4v4", "rk4v4-e8"])
@pytest.mark.parametrize("size", [0.0, 1e-7, 3e-3, 40.0, 1e5])
def test_values_of_any_size_are_encoded_as_the_codecs_do(format, size):
    heads = Heads(dims=64, half=8)
    arguments = draw(heads, 4, seed=2)
    arguments[0] = (arguments[0] * size).astype(np.float32)
    page, row = places(arguments)
    _, pool = run(heads, arguments, format)
    values = arguments[0].reshape(4, -1, heads.dims)[:, -heads.kv :]
    for got, want in zip(jax.tree.leaves(pool.v), jax.tree.leaves(jit_encode(jnp.asarray(values), format, "v")), strict=True):
        same(got[page, :, row], np.asarray(want))


def test_tokens_without_a_home_go_to_page_zero():
    arguments = draw(ODD, 6, seed=3)
    arguments[6][:4] = -1, -7, PER_SLOT * PAGE, PER_SLOT * PAGE + 1000
    _, pool = run(ODD, arguments, "f32")
    page, row = places([a[4:] for a in [*[np.zeros(6)] * 5, *arguments[5:]]])
    for got, was in zip(jax.tree.leaves(pool), jax.tree.leaves(worst_pool(ODD, "f32")), strict=True):
        was[page, :, row] = got[page, :, row]
        same(got[1:], was[1:])
        same(got[0, :, 1:], was[0, :, 1:])


@pytest.mark.parametrize("format", ["f32", "rk8v4"])
def test_a_token_has_the_same_bits_alone_and_among_others(format):
    """Under a table of its own, and under one that all share."""
    arguments = draw(ODD, 40, seed=4)
    arguments[5][:] = arguments[5][0]
    arguments[6][:] = np.arange(40) + 50
    page, row = places(arguments)
    q, pool = run(ODD, arguments, format)
    shared, _ = run(ODD, [*arguments[:5], arguments[5][0], arguments[6]], format)
    same(shared, q)
    for token in (0, 13, 39):
        own = [a[token : token + 1] if len(a) == 40 else a for a in arguments]
        alone, own_pool = run(ODD, own, format)
        same(alone[0], q[token])
        for got, want in zip(jax.tree.leaves(own_pool), jax.tree.leaves(pool), strict=True):
            same(got[page[token], :, row[token]], want[page[token], :, row[token]])


def test_bfloat16_is_rounded_after_the_norm_and_after_the_turn():
    """Values as they are; queries and keys within two roundings of 2^-9 each, the second of up to 1.4 times as much."""
    heads = Heads(dims=128, half=16, dtype="bfloat16")
    arguments = draw(heads, 3, seed=5)
    q, k, v = exact(heads, arguments)
    page, row = places(arguments)
    got, pool = run(heads, arguments, "bf16")
    for x, want in ((got, q), (pool.k.codes[page, :, row].view(jnp.bfloat16), k)):
        x = np.float64(x)
        assert np.abs(x - want).max() <= 2**-7 * np.abs(want).max()
        assert np.linalg.norm(x - want) <= 2**-8 * np.linalg.norm(want)
    same(pool.v.codes[page, :, row], v.astype(jnp.bfloat16).view(np.uint16))


def test_a_pool_changes_in_place():
    pool = jax.tree.map(jnp.array, worst_pool(ODD, "int8"))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    _, after = _run(pool, draw(ODD, 2), "int8")
    assert isinstance(after, KVPages)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == pointers
