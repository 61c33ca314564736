"""Decode attention by the CPU kernel: float64 over the stored vectors, bits in any company, and what pages may never do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.kv_codecs import FORMATS, decode, encode
from pallas_kernels.kv_pages import PAGE, KVPages, pages_struct


@dataclasses.dataclass(frozen=True)
class Heads:
    query: int = 6
    kv: int = 2
    dims: int = 128
    dtype: str = "float32"

    @property
    def width(self):
        return 2 * (self.query + self.kv) * self.dims


SMALL = Heads()
REAL = Heads(query=24, kv=4, dims=256)


@functools.partial(jax.jit, static_argnames="format")
def _run(q, projected, pool, table, positions, filled, format):
    return decode_attention(q, projected, pool, table, positions, filled, format=format, impl="cpu")


@functools.partial(jax.jit, static_argnames=("format", "part"))
def _stored(x, format, part):
    """The packed vectors, and what they decode to."""
    packed = encode(x, format, part)
    return packed, decode(packed, format, part)


class Cache:
    """Slots of `lengths` tokens in pages of random order; every byte that no token owns is NaN, or random."""

    def __init__(self, heads, format, lengths, pages=24, per_slot=20, seed=0):
        self.heads, self.format, self.lengths = heads, format, np.array(lengths, np.int32)
        rng = np.random.default_rng(seed)
        self.pool = jax.tree.map(lambda s: _worst(s, rng), pages_struct(format, pages, heads.kv, heads.dims))
        self.table = np.zeros((len(lengths), per_slot), np.int32)
        self.values = []  # k and v of every slot as they are stored, float64
        order = iter(rng.permutation(np.arange(1, pages)).tolist())
        for slot, n in enumerate(lengths):
            for page in range(-(-n // PAGE)):
                self.table[slot, page] = next(order)
            own = []
            for part in ("k", "v"):
                x = (1.5 * rng.normal(size=(per_slot * PAGE, heads.kv, heads.dims))).astype(np.float32)
                packed, decoded = _stored(x, format, part)
                own.append(np.float64(decoded)[:n])
                for target, leaf in zip(jax.tree.leaves(getattr(self.pool, part)), jax.tree.leaves(packed), strict=True):
                    leaf = np.asarray(leaf).view(target.dtype)
                    for token in range(n):
                        target[self.table[slot, token // PAGE], :, token % PAGE] = leaf[token]
            self.values.append(own)

    def draw(self, rows, seed=1):
        """q as the model has it `[slots, rows, heads, dims]`, projected, and positions of the last rows of every slot."""
        rng = np.random.default_rng(seed)
        slots = len(self.lengths)
        q = (1.5 * rng.normal(size=(slots, rows, self.heads.query, self.heads.dims))).astype(np.float32)
        projected = rng.normal(size=(slots * rows, self.heads.width)).astype(self.heads.dtype)
        return q, projected, self.lengths[:, None] - rows + np.arange(rows, dtype=np.int32)

    def run(self, q, projected, positions, filled=None, slots=slice(None)):
        """`[slots, rows, heads, dims]`."""
        scaled = q.astype(np.float64) / np.sqrt(self.heads.dims)
        if self.format.startswith("rk"):
            scaled = hadamard(scaled)
        filled = self.lengths if filled is None else filled
        out = _run(
            scaled[slots].astype(np.float32), projected, self.pool, self.table[slots], positions[slots], filled[slots], self.format
        )
        return np.array(out).reshape(q[slots].shape)

    def exact(self, q, projected, positions):
        """float64, head by head; and how far float32 may be from it, see `tolerance`."""
        heads = self.heads
        out, allowed = np.zeros(q.shape), np.zeros(q.shape)
        gates = np.float64(projected)[:, : 2 * heads.query * heads.dims].reshape(*q.shape[:2], heads.query, 2, heads.dims)[
            ..., 1, :
        ]
        for slot, row, head in np.ndindex(*q.shape[:3]):
            n = min(positions[slot, row], self.lengths[slot] - 1) + 1
            if n <= 0:
                continue
            k, v = (x[:n, head // (heads.query // heads.kv)] for x in self.values[slot])
            terms = k * np.float64(q[slot, row, head]) / np.sqrt(heads.dims)
            scores = terms.sum(1)
            weights = np.exp(scores - scores.max())
            out[slot, row, head] = weights @ v / weights.sum()
            allowed[slot, row, head] = tolerance(np.abs(terms).sum(1).max(), np.abs(v).max(), heads.dims, n)
        gate = 1 / (1 + np.exp(-gates))
        return out * gate, allowed * gate


def tolerance(magnitude, largest, dims, tokens):
    """A score is a chain of dims / 16 sums and four halvings, of terms that come to `magnitude`, from a query and key of
    float32 (rotated: from sums of 64); its weight is off by as much, the result by that times its distance from a value,
    and by the chain over a page's tokens."""
    scores = (dims / 16 + 16) * 2**-24 * magnitude + 2**-21
    return (2 * scores + (PAGE + tokens / PAGE) * 2**-24) * largest


def _worst(struct, rng):
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return np.full(struct.shape, np.nan, struct.dtype)
    if struct.dtype == jnp.uint16:
        return np.full(struct.shape, 0x7FC0, struct.dtype)  # bfloat16's NaN
    raw = rng.integers(0, 256, (*struct.shape, struct.dtype.itemsize), np.uint8)
    return raw.view(struct.dtype).reshape(struct.shape)


def hadamard(x):
    i = np.arange(64).tolist()
    signs = np.array([[(-1.0) ** (a & b).bit_count() for b in i] for a in i]) / 8
    return (x.reshape(*x.shape[:-1], -1, 64) @ signs).reshape(x.shape)


def same(got, want):
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def check(cache, rows):
    drawn = cache.draw(rows)
    got, (want, allowed) = cache.run(*drawn), cache.exact(*drawn)
    assert (np.abs(got - want) <= allowed).all()
    return got


@pytest.mark.parametrize("format", FORMATS)
def test_equals_float64(format):
    """Slots around the borders of blocks of 16, of pages and of a round of all 16 splits; an empty one among them."""
    got = check(Cache(SMALL, format, [16 * PAGE + 70, 63, 0, 65]), 4)
    assert not got[2].any()


@pytest.mark.parametrize("heads, rows", [(REAL, 4), (Heads(query=2, kv=2, dims=64), 5), (Heads(query=5, kv=1, dims=192), 1)])
def test_heads_of_all_sizes(heads, rows):
    for format in ("f32", "rk4v4-e8"):
        check(Cache(heads, format, [rows + 130], pages=4, per_slot=3), rows)


@pytest.mark.parametrize("format, counts", [("f32", [1, 2, 3, 4, 5]), ("rk4v4-e8", [1, 4])])
def test_a_row_has_the_same_bits_alone_and_beside_others(format, counts):
    """Every row of six, over the border between splits (17 pages); and each slot without the other."""
    cache = Cache(SMALL, format, [16 * PAGE + 3, 66])
    q, projected, positions = cache.draw(6)
    together = cache.run(q, projected, positions)
    lines = projected.reshape(2, 6, -1)
    for slot in (0, 1):
        same(cache.run(q, lines[slot], positions, slots=slice(slot, slot + 1))[0], together[slot])
    for rows in counts:
        for first in range(0, 7 - rows, rows):
            own = slice(first, first + rows)
            alone = cache.run(
                q[:, own], lines[:, own].reshape(2 * rows, -1), positions[:, own], filled=positions[:, own][:, -1] + 1
            )
            same(alone, together[:, own])


def test_rows_past_the_filled_length_see_no_stale_key():
    """Drafts beyond the context have positions that no page holds."""
    cache = Cache(SMALL, "f32", [100])
    q, projected, _ = cache.draw(3)
    q[:, 1:], projected[1:] = q[:, :1], projected[:1]
    out = cache.run(q, projected, np.array([[99, 100, 383]], np.int32))
    same(out[0, 1], out[0, 0])
    same(out[0, 2], out[0, 0])


def test_a_slot_without_tokens_gives_zeros_whatever_its_gates():
    cache = Cache(SMALL, "bf16", [0, 70])
    q, projected, positions = cache.draw(2)
    projected[:2], q[0] = np.nan, np.nan
    out = cache.run(q, projected, positions)
    assert not out[0].any() and np.isfinite(out[1]).all()


def test_scores_far_apart_and_all_alike():
    """Keys times 40: one weight is 1 and the others next to 0, wherever it stands. Keys of zero: the mean of the values."""
    cache = Cache(SMALL, "f32", [16 * PAGE + 9])
    q, projected, positions = cache.draw(2)
    cache.pool.k.codes[cache.table[0, :17]] *= 40
    cache.values[0][0] *= 40
    got, (want, allowed) = cache.run(q, projected, positions), cache.exact(q, projected, positions)
    assert (np.abs(got - want) <= allowed).all()
    cache.pool.k.codes[cache.table[0, :17]] = 0
    cache.values[0][0] *= 0
    got, (want, allowed) = cache.run(q, projected, positions), cache.exact(q, projected, positions)
    assert (np.abs(got - want) <= allowed).all()


def test_bfloat16_results_are_rounded_as_the_model_rounds():
    """The result, the gate and their product, 2^-8 each."""
    heads = dataclasses.replace(SMALL, dtype="bfloat16")
    cache = Cache(heads, "bf16", [90])
    drawn = cache.draw(2)
    got, (want, allowed) = cache.run(*drawn), cache.exact(*drawn)
    assert got.dtype == jnp.bfloat16
    assert (np.abs(np.float64(got) - want) <= 3.1 * 2**-8 * np.abs(want) + allowed + 1e-30).all()


def test_pools_are_not_copied():
    """The compiled call holds no array of the pool's size beside the pool."""
    pool = pages_struct("int8", 1009, 2, 128)
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct((1, 2, 6, 128), jnp.float32),
        struct((2, SMALL.width), jnp.float32),
        KVPages(*pool),
        struct((1, 20), jnp.int32),
        struct((1, 2), jnp.int32),
        struct((1,), jnp.int32),
    )
    memory = _run.lower(*arguments, "int8").compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 16 * 6 * (128 + 2) * 4 + 10_000
