"""Prefill attention: numbers against float64 NumPy that decodes the pages by their description, and compiled facts."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_packed_ptx as ptx

from pallas_kernels import launch
from pallas_kernels.lab import rows
from pallas_kernels.prefill_attention import cases, pages

CASE = {case.format: case for case in cases.SMALL}  # of two cases of a format, the longer one


def hadamard(x):
    """H64 of every 64 numbers, from the doubling rule."""
    h = np.ones((1, 1))
    while len(h) < 64:
        h = np.block([[h, h], [h, -h]])
    return (x.reshape(*x.shape[:-1], -1, 64) @ h / 8).reshape(x.shape)


def decoded(codes, scales, lattice):
    """float64 `[pages, heads, 64, D]` from stored numbers."""
    codes = np.asarray(codes)
    if codes.dtype == np.float32:
        return codes.astype(np.float64)
    if codes.dtype == np.uint16:
        return codes.view(ml_dtypes.bfloat16).astype(np.float64)
    if codes.dtype == np.int8:
        return codes * np.repeat(np.asarray(scales, np.float64), 64, axis=-1)
    nibbles = np.stack([(codes >> np.uint32(4 * i)) & 15 for i in range(8)], axis=-1).astype(np.int64) - 8
    half = np.zeros(codes.shape)
    if lattice:  # bit 28 is the half; the sum of all eight codes is even, which gives nibble 7's own low bit
        half = (codes >> np.uint32(28)) & 1
        nibbles[..., 7] += (nibbles[..., :7].sum(-1) & 1) - half
    byte = np.asarray(scales).astype(np.int64)
    scale = np.where(byte & 128, -1, 1) * 2.0 ** ((byte >> 3 & 15) - 10) * (1 + (byte & 7) / 8)
    values = (nibbles + half[..., None] / 2).reshape(*codes.shape[:-1], -1)
    return values * np.repeat(scale, 32, axis=-1)


def oracle(case, q, projected, pool, table, start, count):
    """float64 results of the valid rows."""
    q, projected = (np.asarray(a, np.float64) for a in (q, projected))
    keys, values = (decoded(part.codes, part.scales, case.format == "rk4v4-e8") for part in pool)
    start, count = int(start), int(count)
    used = np.asarray(table)[: -(-(start + count) // 64)]
    out = np.zeros((count, case.heads, case.head_dim))
    for t, h in np.ndindex(out.shape[:2]):
        k, v = (a[used, h // (case.heads // case.kv_heads)].reshape(-1, case.head_dim)[: start + t + 1] for a in (keys, values))
        scores = k @ q[t, h]
        p = np.exp(scores - scores.max())
        out[t, h] = p @ v / p.sum()
    out = hadamard(out) if case.format.startswith("rk") else out
    gates = projected[:count].reshape(count, -1, case.head_dim)[:, 1 : 2 * case.heads : 2]
    return (out / (1 + np.exp(-gates))).reshape(count, -1)


@functools.cache
def interpreted(case):
    # Most of these tests' time is LLVM's; it has little to win on programs that run for milliseconds.
    return jax.jit(functools.partial(case.call, interpret=True), compiler_options={"xla_backend_optimization_level": 0})


def run(case, arguments):
    """The interpreted kernel's result as float64."""
    return np.asarray(interpreted(case)(*arguments), np.float64)


@functools.cache
def plain(case):
    """Random arguments and the result."""
    arguments = case.sample(jax.random.key(0))
    return arguments, run(case, arguments)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_kernel_against_float64(case):
    """45 valid rows of 50, on their own or after 128 other tokens; the rest gives zeros."""
    arguments, got = plain(case)
    want = oracle(case, *arguments)
    assert relative(got[: case.count], want) <= (1e-5 if case.format == "f32" else 4e-3)
    assert not got[case.count :].any()


@pytest.mark.bits
@pytest.mark.parametrize("case", CASE.values(), ids=lambda c: c.name)
def test_stale_pages_and_padding_rows_change_nothing(case):
    """All bits set in page 0 and behind the last token; NaN in queries and gates of rows that are not valid."""
    (q, projected, pool, table, start, count), want = plain(case)
    valid = np.zeros((pool.k.codes.shape[0], 64), bool)
    for i, page in enumerate(np.asarray(table)):
        valid[page, : case.filled - 64 * i] = True

    def spoil(leaf):
        a = np.array(leaf)
        a.view(np.uint8)[~np.broadcast_to(valid[:, None], a.shape[:3])] = 0xFF
        return jnp.asarray(a)

    poisoned = [q.at[case.count :].set(jnp.nan), projected.at[case.count :].set(jnp.nan), jax.tree.map(spoil, pool)]
    np.testing.assert_array_equal(run(case, [*poisoned, table, start, count]), want)


@pytest.mark.bits
def test_where_pages_lie_changes_nothing():
    case = CASE["rk4v4-e8"]
    (q, projected, pool, table, start, count), want = plain(case)
    place = np.concatenate([[0], np.random.default_rng(0).permutation(pool.k.codes.shape[0] - 1) + 1])
    moved = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[place].set(leaf), pool)
    np.testing.assert_array_equal(run(case, [q, projected, moved, jnp.asarray(place, jnp.int32)[table], start, count]), want)


@pytest.mark.bits
@pytest.mark.parametrize("skip,count", [(7, 38), (11, 1), (20, 13), (44, 1)])
def test_a_row_has_the_same_bits_in_any_chunk(skip, count):
    """The same tokens in a chunk that starts later or ends earlier: other tiles, other neighbours."""
    case = CASE["rk4v4-e8"]
    (q, projected, pool, table, start, _), want = plain(case)
    q, projected = (jnp.roll(a, -skip, axis=0) for a in (q, projected))
    got = run(case, [q, projected, pool, table, start + skip, jnp.int32(count)])
    np.testing.assert_array_equal(got[:count], want[skip : skip + count])
    assert not got[count:].any()


def test_no_valid_row_at_all():
    case = CASE["rk4v4-e8"]
    arguments, _ = plain(case)
    assert not run(case, [*arguments[:-1], jnp.int32(0)]).any()


def test_weights_far_below_the_largest_still_count():
    """A first token of e^16 times the weight of each that follows: their sum is seen beside it."""
    case = CASE["f32"]
    q, projected, pool, table, start, count = plain(case)[0]
    q = jnp.zeros_like(q).at[..., 0].set(1.0)
    keys = jnp.zeros_like(pool.k.codes).at[table[0], :, 0, 0].set(16.0)
    arguments = [q, projected, pool._replace(k=type(pool.k)(keys)), table, start, count]
    got, want = run(case, arguments)[: case.count], oracle(case, *arguments)
    first = oracle(case, *arguments[:4], np.int32(0), np.int32(1))[0]
    gates = np.asarray(projected, np.float64)[: case.count].reshape(case.count, -1, case.head_dim)[:, 1 : 2 * case.heads : 2]
    gates = (1 / (1 + np.exp(-gates))).reshape(case.count, -1)
    alone = first / gates[0] * gates
    assert relative(got - alone, want - alone) < 0.1


@pytest.fixture
def captured(monkeypatch):
    """Calls of `launch.packed` answer with their twin and leave (asm, arguments, result, pack) here."""
    calls = []

    def packed(asm, twin, *args, dtype, interpret, pack=2):
        calls.append((asm, [np.asarray(a) for a in args], np.asarray(twin(*args)), pack))
        return twin(*args)

    monkeypatch.setattr(launch, "packed", packed)
    monkeypatch.setitem(ptx.INSTRUCTIONS, "xor.b32", lambda a, b: a ^ b)
    return calls


def test_ptx_says_what_its_twins_say(captured):
    """Every scale byte beside every nibble, plain and lattice; every 8-bit code."""
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2**32, size=(256, 32), dtype=np.uint32))
    scales = jnp.broadcast_to(jnp.arange(256, dtype=jnp.uint8)[:, None], (256, 8))
    for lattice in (False, True):
        got = np.asarray(pages.four_bit(words, scales, lattice, False), np.float64)
        want = decoded(np.asarray(words)[None, None], np.asarray(scales)[None, None], lattice)[0, 0]
        np.testing.assert_array_equal(got, np.asarray(pages.to_stored_order(jnp.asarray(want, jnp.float32)), np.float64))
    codes = jnp.asarray(rng.permutation(np.tile(np.arange(-128, 128), 64)), jnp.int8).reshape(256, 64)
    np.testing.assert_array_equal(np.asarray(pages.eight_bit(codes, False), np.int32), codes)
    assert len(captured) == 8 + 2 + 8 + 1
    for asm, arguments, twin, pack in captured:
        inputs = [r for a in arguments for r in ptx.registers(a, pack)]
        got, want = ptx.run_ptx(asm, *inputs), ptx.registers(twin, pack)[0]
        if twin.dtype == ml_dtypes.bfloat16:  # minus zero and zero are one value
            got, want = np.stack(ptx.halves(got)), np.stack(ptx.halves(want))
        np.testing.assert_array_equal(got, want)


@functools.cache
def compiled(case, target="rtx4090"):
    return rows.measure(case, target)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_compiled_for_a_4090(case):
    """Registers, shared memory, tensor cores, traffic and the instruction budget, from the machine code for sm_89."""
    row = compiled(case)
    assert row.launches == 2  # the other one packs the queries
    assert row.spill_bytes == 0
    assert row.smem_bytes <= 99 * 1024
    assert row.blocks_per_sm >= 2
    assert row.tensor_core_instructions > 0
    assert row.conversions == 0
    # Beyond pages, queries, gates and results: the packed queries, written and read.
    assert row.bytes_moved <= 1.05 * row.ideal_bytes + 4 * case.tokens * case.heads * case.head_dim
    # Tensor cores are the limit: instructions become one at half a thread instruction a multiply-add.
    assert row.limit == "tensor"
    if case.filled >= cases.LONG:
        instructions = row.thread_instructions_per_byte * case.weight_bytes / row.multiply_adds
        assert instructions <= {"rk8v4": 0.26, "int8": 0.29, "bf16": 0.09}.get(case.format, 0.18)
