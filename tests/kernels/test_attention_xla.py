"""Attention over pages against float64 NumPy attention over the decoded vectors, and what pages may never do.

Pools are filled by hand here: the oracle shares neither `append` nor the block walk with what it checks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.kv_codecs import FORMATS, Packed, decode, encode
from pallas_kernels.kv_pages import PAGE, KVPages, append, pages_struct, read_tokens
from pallas_kernels.prefill_attention import reference as prefill_reference

KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 6, 128
PER_SLOT = 6  # pages; no multiple of the pages in a block
POOL = 31

jit_decode_attend = jax.jit(decode_reference.attend, static_argnames="format")
jit_prefill_attend = jax.jit(prefill_reference.attend, static_argnames="format")
run_append = jax.jit(append, static_argnames="format")
jit_encode = jax.jit(encode, static_argnames=("format", "part"))
jit_decode = jax.jit(decode, static_argnames=("format", "part"))


def in_stored_basis(q: np.ndarray, format: str) -> np.ndarray:
    """Queries as the walk over pages wants them: scaled, and for rotated formats times the 64 x 64 Hadamard matrix."""
    q = q / np.sqrt(HEAD_DIM)
    if format.startswith("rk"):
        i = np.arange(64)
        signs = (-1.0) ** np.array([[bin(a & b).count("1") for b in i] for a in i])
        q = (q.reshape(*q.shape[:-1], -1, 64) @ (signs / 8)).reshape(q.shape)
    return q.astype(np.float32)


def run_decode(
    q: np.ndarray, pool: KVPages, tables: np.ndarray, positions: np.ndarray, filled: np.ndarray, format: str
) -> jax.Array:
    return jit_decode_attend(in_stored_basis(q, format), pool, tables, positions, filled, format)


def run_prefill(q: np.ndarray, pool: KVPages, table: np.ndarray, start: np.int32, count: np.int32, format: str) -> jax.Array:
    return jit_prefill_attend(in_stored_basis(q, format), pool, table, start, count, format)


def encoded(x: np.ndarray, format: str, part: str) -> Packed:
    """The packed vectors of x `[tokens, kv_heads, head_dim]`, computed at one shape for all lengths."""
    whole = np.zeros((PER_SLOT * PAGE, *x.shape[1:]), np.float32)
    whole[: len(x)] = x
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(x)], jit_encode(whole, format, part))


def stored(x: np.ndarray, format: str, part: str) -> np.ndarray:
    """What the cache holds of x, float64."""
    whole = np.zeros((PER_SLOT * PAGE, *x.shape[1:]), np.float32)
    whole[: len(x)] = x
    return np.asarray(jit_decode(jit_encode(whole, format, part), format, part), np.float64)[: len(x)]


def filled_with(format: str, poison: str, seed: int = 0) -> KVPages:
    """A pool of NumPy arrays, all zero or holding the worst that a stale page could."""
    rng = np.random.default_rng(seed)

    def leaf(struct: jax.ShapeDtypeStruct) -> np.ndarray:
        if poison == "zeros":
            return np.zeros(struct.shape, struct.dtype)
        if jnp.issubdtype(struct.dtype, jnp.floating):
            return np.full(struct.shape, np.nan, struct.dtype)
        if struct.dtype == jnp.uint16:
            return np.full(struct.shape, 0x7FC0, struct.dtype)  # bfloat16's NaN
        raw = rng.integers(0, 256, struct.shape + (struct.dtype.itemsize,), np.uint8)
        return raw.view(struct.dtype).reshape(struct.shape)

    return jax.tree.map(leaf, pages_struct(format, POOL, KV_HEADS, HEAD_DIM))


def place(pool: KVPages, format: str, row: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Write k and v `[tokens, kv_heads, head_dim]` into the pages of a block-table row, token by token."""
    for part, x, leaves in (("k", k, pool.k), ("v", v, pool.v)):
        for target, rows in zip(jax.tree.leaves(leaves), jax.tree.leaves(encoded(x, format, part)), strict=True):
            for token, vector in enumerate(rows.view(target.dtype)):
                target[row[token // PAGE], :, token % PAGE] = vector


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One query row `[query_heads, head_dim]` over all of k and v `[tokens, kv_heads, head_dim]`, head by head."""
    out = np.zeros(q.shape)
    group = q.shape[0] // k.shape[1]
    for head, vector in enumerate(q.astype(np.float64)):
        scores = k[:, head // group] @ vector / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // group] / weights.sum()
    return out


def near(one: np.ndarray, other: np.ndarray) -> None:
    """Each is within 2e-5 of the exact result, which `test_decode_attention` holds them to, so no more than twice that apart."""
    assert np.isfinite(one).all()
    np.testing.assert_allclose(one, other, rtol=4e-5, atol=4e-5)


def some_tables(slots: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.arange(1, POOL))[: slots * PER_SLOT].reshape(slots, PER_SLOT).astype(np.int32)


def vectors(rng: np.random.Generator, tokens: int, heads: int) -> np.ndarray:
    return (rng.normal(size=(tokens, heads, HEAD_DIM)) * 1.5).astype(np.float32)


@pytest.mark.bits
@pytest.mark.parametrize("format, rows", [(format, 6) for format in FORMATS] + [("f32", 1), ("int8", 1), ("rk4v4-e8", 1)])
def test_decode_attention(format: str, rows: int) -> None:
    """Ragged slots around the borders of pages (64) and blocks (256), an empty one among them."""
    rng = np.random.default_rng(rows)
    for lengths in ([rows, 0], [64, 63], [65, 256], [255, 257], [384, 130]):
        tables = some_tables(2, rng)
        q = np.stack([vectors(rng, rows, QUERY_HEADS) for _ in lengths])
        positions = np.array([[n - rows + r for r in range(rows)] for n in lengths], np.int32)
        pools = [filled_with(format, poison) for poison in ("zeros", "worst")]
        expected = np.zeros((2, rows, QUERY_HEADS, HEAD_DIM))
        for slot, n in enumerate(lengths):
            k, v = vectors(rng, n, KV_HEADS), vectors(rng, n, KV_HEADS)
            tables[slot, -(-n // PAGE) :] = 0  # a sequence owns what it needs
            if n:
                for pool in pools:
                    place(pool, format, tables[slot], k, v)
                k, v = stored(k, format, "k"), stored(v, format, "v")
                for r, position in enumerate(positions[slot]):
                    expected[slot, r] = attend(q[slot, r], k[: position + 1], v[: position + 1])
        clean, poisoned = (
            np.asarray(run_decode(q, pool, tables, positions, np.array(lengths, np.int32), format)) for pool in pools
        )
        np.testing.assert_allclose(clean, expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(clean, poisoned)
        assert not clean[np.array(lengths) == 0].any()


def test_rows_past_the_filled_length_see_no_stale_key() -> None:
    """Drafts beyond the context have positions that no page holds; they must not turn into NaN."""
    rng = np.random.default_rng(4)
    tables, pool = some_tables(1, rng), filled_with("f32", "worst")
    place(pool, "f32", tables[0], vectors(rng, 100, KV_HEADS), vectors(rng, 100, KV_HEADS))
    q = np.broadcast_to(vectors(rng, 1, QUERY_HEADS), (1, 3, QUERY_HEADS, HEAD_DIM))
    out = np.asarray(run_decode(q, pool, tables, np.array([[99, 100, 383]], np.int32), np.array([100], np.int32), "f32"))
    near(out[0, 1:], out[0, :1].repeat(2, 0))


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    """To rounding: one row and six are two programs. An engine on a CPU compiles a row of one slot alone, whatever its K."""
    rng = np.random.default_rng(5)
    tables, pool = some_tables(1, rng), filled_with("f32", "worst")
    place(pool, "f32", tables[0], vectors(rng, 259, KV_HEADS), vectors(rng, 259, KV_HEADS))
    q = vectors(rng, 6, QUERY_HEADS)[None]
    positions = np.arange(253, 259, dtype=np.int32)[None]  # across a block border
    together = np.asarray(run_decode(q, pool, tables, positions, np.array([259], np.int32), "f32"))
    for r in range(6):
        filled = positions[0, r : r + 1] + 1
        alone = np.asarray(run_decode(q[:, r : r + 1], pool, tables, positions[:, r : r + 1], filled, "f32"))
        near(alone[0, 0], together[0, r])


@pytest.mark.bits
@pytest.mark.parametrize("format", FORMATS)
def test_prefill_attention(format: str) -> None:
    """A chunk of 128 anywhere in a slot; its padding rows are finite whatever stale pages hold."""
    rng = np.random.default_rng(6)
    for start, count in ((0, 1), (0, 128), (64, 128), (63, 66), (129, 127), (193, 64), (256, 128)):
        filled = start + count
        table = some_tables(1, rng)[0]
        table[-(-filled // PAGE) :] = 0
        k, v, q = vectors(rng, filled, KV_HEADS), vectors(rng, filled, KV_HEADS), vectors(rng, 128, QUERY_HEADS)
        pools = [filled_with(format, poison) for poison in ("zeros", "worst")]
        for pool in pools:
            place(pool, format, table, k, v)
        clean, poisoned = (np.asarray(run_prefill(q, pool, table, np.int32(start), np.int32(count), format)) for pool in pools)
        k, v = stored(k, format, "k"), stored(v, format, "v")
        for r in {0, 1, count // 2, count - 1} & set(range(count)):
            np.testing.assert_allclose(clean[r], attend(q[r], k[: start + r + 1], v[: start + r + 1]), rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(clean, poisoned)
        assert np.isfinite(poisoned).all()


@pytest.mark.bits
@pytest.mark.parametrize("format", FORMATS)
def test_append_writes_the_encoded_vectors_and_nothing_else(format: str) -> None:
    rng = np.random.default_rng(7)
    tokens = 12
    tables = some_tables(3, rng)
    tables[0, 2] = 0  # not owned
    slot = rng.integers(0, 3, tokens)
    # Distinct places with a home, then the homeless: padding, beyond the table, on a page that the slot does not own.
    positions = rng.permutation(PER_SLOT * PAGE)[:tokens]
    slot[:4], positions[:4] = 0, [-1, PER_SLOT * PAGE, PER_SLOT * PAGE + 700, 2 * PAGE + 5]
    slot[4:] = np.where(positions[4:] // PAGE == 2, 1, slot[4:])
    slot[4:6], positions[4:6] = 2, [63, 64]
    k, v = vectors(rng, tokens, KV_HEADS), vectors(rng, tokens, KV_HEADS)
    before = filled_with(format, "worst")
    after = jax.tree.map(np.asarray, run_append(before, k, v, tables[slot], positions.astype(np.int32), format))
    expected = jax.tree.map(np.copy, before)
    for t in range(4, tokens):
        for part, x, leaves in (("k", k, expected.k), ("v", v, expected.v)):
            for target, rows in zip(jax.tree.leaves(leaves), jax.tree.leaves(encoded(x, format, part)), strict=True):
                target[tables[slot[t], positions[t] // PAGE], :, positions[t] % PAGE] = rows.view(target.dtype)[t]
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got[1:].view(np.uint8), want[1:].view(np.uint8))
    kept = np.delete(np.arange(PAGE), [0, 5])  # where in page 0 the homeless of this test go
    for got, was in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got[0][:, kept].view(np.uint8), was[0][:, kept].view(np.uint8))


@pytest.mark.bits
@pytest.mark.parametrize("format", FORMATS)
def test_what_was_appended_is_read_back(format: str) -> None:
    """A prompt in three pieces under one shared block table, as prefill appends it; padding beyond the table hits no page."""
    rng = np.random.default_rng(8)
    table, total = some_tables(1, rng)[0], 150
    k, v = vectors(rng, 192, KV_HEADS), vectors(rng, 192, KV_HEADS)
    before = pool = filled_with(format, "worst")
    for start in (0, 64, 128):
        at = np.arange(start, start + 64)
        homeless = np.where(at % 2, -1, PER_SLOT * PAGE + at)
        pool = run_append(pool, k[at], v[at], table, np.where(at < total, at, homeless).astype(np.int32), format)
    unused = np.setdiff1d(np.arange(1, POOL), table[:3])
    for got, was in zip(jax.tree.leaves(pool), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[unused].view(np.uint8), was[unused].view(np.uint8))
    for tokens in (64, total):
        got = read_tokens(pool, table, tokens)
        want = KVPages(encoded(k[:tokens], format, "k"), encoded(v[:tokens], format, "v"))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
