"""Decode attention: numbers against float64 NumPy that decodes the pages by their description, and compiled facts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_packed_ptx as ptx

from pallas_kernels import launch, targets
from pallas_kernels.decode_attention import cases, kernel, tiles
from pallas_kernels.kv_codecs import Packed
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.lab import rows

D = cases.HEAD_DIM
CASE = {case.format: case for case in cases.SMALL if case.slots == 1 and case.rows == 4}
SLOTS = next(case for case in cases.SMALL if case.slots == 4)


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
    if lattice:  # bit 28 is the half; the parity of the sum of all eight codes is even, which gives nibble 7's own low bit
        half = (codes >> np.uint32(28)) & 1
        nibbles[..., 7] += (nibbles[..., :7].sum(-1) & 1) - half
    byte = np.asarray(scales).astype(np.int64)
    scale = np.where(byte & 128, -1, 1) * 2.0 ** ((byte >> 3 & 15) - 10) * (1 + (byte & 7) / 8)
    values = (nibbles + half[..., None] / 2).reshape(*codes.shape[:-1], D)
    return values * np.repeat(scale, 32, axis=-1)


def oracle(case, q, projected, pool, table, positions, filled):
    q, projected = (np.asarray(a, np.float64) for a in (q, projected))
    keys, values = (decoded(part.codes, part.scales, case.format == "rk4v4-e8") for part in pool)
    out = np.zeros((case.slots, case.rows, case.heads, D))
    for s, r, h in np.ndindex(out.shape[:3]):
        count = min(int(positions[s, r]) + 1, int(filled[s]))
        if count <= 0:
            continue
        pages = np.asarray(table)[s, : -(-count // 64)]
        k, v = (a[pages, h // (case.heads // case.kv_heads)].reshape(-1, D)[:count] for a in (keys, values))
        scores = k @ q[s, r, h]
        p = np.exp(scores - scores.max())
        out[s, r, h] = p @ v / p.sum()
    out = hadamard(out) if case.format.startswith("rk") else out
    gates = projected.reshape(case.slots, case.rows, -1, D)[:, :, 1 : 2 * case.heads : 2]
    return (out / (1 + np.exp(-gates))).reshape(case.slots * case.rows, -1)


@functools.cache
def interpreted(case):
    # Most of these tests' time is LLVM's; it has little to win on programs that run for milliseconds. Rounding to fp16
    # and back would be dropped otherwise.
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    return jax.jit(functools.partial(case.call, interpret=True), compiler_options=options)


def run(case, arguments):
    """The interpreted kernel's result as float64."""
    return np.asarray(interpreted(case)(*arguments), np.float64)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@functools.cache
def drawn(case, seed=0):
    return case.sample(jax.random.key(seed))


@functools.cache
def plain(case):
    """Random arguments and the result."""
    return drawn(case), run(case, drawn(case))


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_kernel_against_float64(case):
    """333 tokens of one slot, or slots of 333, 0, 9 and 64 in one launch; the empty one gives zeros."""
    arguments, got = plain(case)
    want = oracle(case, *arguments)
    assert got.shape == want.shape
    assert relative(got, want) <= (1e-5 if case.format == "f32" else 4e-3)
    for slot, count in enumerate(case.filled):
        assert got.reshape(case.slots, -1)[slot].any() == (count > 0)


def poisoned(case, arguments):
    """All bits set in page 0, in pages of no slot, and behind the last token of each slot's last page."""
    q, projected, pool, table, positions, filled = arguments
    valid = np.zeros((pool.k.codes.shape[0], 64), bool)
    for pages, count in zip(np.asarray(table), np.asarray(filled), strict=True):
        for i in range(-(-int(count) // 64)):
            valid[pages[i], : int(count) - 64 * i] = True

    def spoil(leaf):
        a = np.array(leaf)
        a.view(np.uint8)[~np.broadcast_to(valid[:, None], a.shape[:3])] = 0xFF
        return jnp.asarray(a)

    return [q, projected, jax.tree.map(spoil, pool), table, positions, filled]


@pytest.mark.bits
@pytest.mark.parametrize("case", [*CASE.values(), SLOTS], ids=lambda c: c.name)
def test_stale_pages_change_nothing(case):
    arguments, want = plain(case)
    np.testing.assert_array_equal(run(case, poisoned(case, arguments)), want)


@pytest.mark.bits
def test_where_pages_lie_changes_nothing():
    arguments, want = plain(SLOTS)
    q, projected, pool, table, positions, filled = arguments
    order = np.random.default_rng(0).permutation(pool.k.codes.shape[0] - 1) + 1
    new_place = np.concatenate([[0], order])
    moved = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[new_place].set(leaf), pool)
    again = [q, projected, moved, jnp.asarray(new_place, jnp.int32)[table], positions, filled]
    np.testing.assert_array_equal(run(SLOTS, again), want)


@pytest.mark.bits
def test_a_row_has_the_same_bits_in_any_company(monkeypatch):
    """One row alone, the same among four, and among six at other columns. Blocks of 8 columns: a CPU's matrix products
    add up in an order that depends on their width; a tensor core's do not."""
    monkeypatch.setattr(kernel, "column_widths", lambda columns: [8] * -(-columns // 8))
    case = dataclasses.replace(CASE["rk4v4-e8"], config=kernel.Config(splits=4))
    q, projected, pool, table, positions, filled = drawn(case)
    want = run(case, drawn(case))
    for take in ([2], [3, 0, 2, 1, 0, 3]):
        other = dataclasses.replace(case, rows=len(take))
        take = np.array(take)
        got = run(other, [q[:, take], projected[take], pool, table, positions[:, take], filled])
        np.testing.assert_array_equal(got, want[take])


@pytest.mark.bits
def test_the_filled_length_changes_no_bit_of_earlier_rows():
    """Rows at positions 5, 63, 64 and 200 of slots filled to 201, 333 and 448: pages, and whole splits, come in masked."""
    case = dataclasses.replace(CASE["rk4v4-e8"], config=kernel.Config(splits=5))
    q, projected, pool, table, _, _ = drawn(case)
    table = table.at[0, 6].set(table[0, 0])
    positions = jnp.array([[5, 63, 64, 200]], jnp.int32)
    results = [run(case, [q, projected, pool, table, positions, jnp.array([n], jnp.int32)]) for n in (201, 333, 448)]
    for got in results[1:]:
        np.testing.assert_array_equal(got, results[0])


@pytest.mark.bits
def test_rows_outside_the_slot():
    """A position of -1 sees nothing: zeros. One beyond the filled tokens sees all of them, as the last one does."""
    case = CASE["rk4v4-e8"]
    (q, projected, pool, table, _, filled), _ = plain(case)
    q, projected = jnp.broadcast_to(q[:, :1], q.shape), jnp.broadcast_to(projected[:1], projected.shape)
    positions = jnp.array([[-1, 332, 333, 1000]], jnp.int32)
    got = run(case, [q, projected, pool, table, positions, filled])
    assert not got[0].any() and got[1].any()
    np.testing.assert_array_equal(got[2], got[1])
    np.testing.assert_array_equal(got[3], got[1])


def test_weights_far_below_the_largest_still_count():
    """A token of small values against 332 equal ones of e^-15.38 of its weight each: plain fp16 would be 14% off."""
    case = dataclasses.replace(CASE["rk8v4"], rows=1, config=kernel.Config(splits=1))
    q, projected, pool, table, positions, filled = drawn(case)
    q = jnp.zeros_like(q).at[..., 0].set(1.0)
    first = jnp.zeros(pool.k.codes.shape[:3], bool).at[table[0, 0], :, 0].set(True)[..., None]
    k = Packed(jnp.where(first, 100, jnp.zeros_like(pool.k.codes)), jnp.full_like(pool.k.scales, 0.1538))
    v = Packed(pool.v.codes[:1, :, :1] + 0 * pool.v.codes, jnp.where(first, 0, pool.v.scales[:1, :, :1]))
    arguments = [q, projected.astype(jnp.float32), KVPages(k, v), table, positions[:, -1:], filled]
    alone, want = oracle(case, *arguments[:-1], np.ones_like(filled)), oracle(case, *arguments)
    assert relative(run(case, arguments) - alone, want - alone) < 0.02


@pytest.fixture
def captured(monkeypatch):
    """Calls of `launch.packed` answer with their twin and leave (asm, arguments, result, pack) here."""
    calls = []

    def packed(asm, twin, *args, dtype, interpret, pack=2):
        calls.append((asm, [np.asarray(a) for a in args], np.asarray(twin(*args)), pack))
        return twin(*args)

    monkeypatch.setattr(launch, "packed", packed)
    monkeypatch.setitem(ptx.INSTRUCTIONS, "popc.b32", lambda a: np.bitwise_count(a))
    monkeypatch.setitem(ptx.INSTRUCTIONS, "add.u32", lambda a, b: a + b)
    monkeypatch.setitem(ptx.INSTRUCTIONS, "fma.rn.f16x2", fma_f16x2)
    return calls


def fma_f16x2(a, b, c):
    def halves(v):
        return [((v >> np.uint32(s)) & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64) for s in (0, 16)]

    low, high = (
        (x * y + z).astype(np.float16).view(np.uint16).astype(np.uint32) for x, y, z in zip(*map(halves, (a, b, c)), strict=True)
    )
    return low | high << 16


def test_ptx_says_what_its_twins_say(captured):
    """Every scale byte and nibble, plain and lattice: scales, parities, halves, planes and moves."""
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2**32, size=(256, 32), dtype=np.uint32))
    stored = jnp.broadcast_to(jnp.arange(256, dtype=jnp.int16)[:, None], words.shape)
    scale = tiles.scale_pairs(stored, False)
    for lattice in (False, True):
        tiles.unpack_words(words, scale, lattice, False)
    for use in range(2):
        tiles._own(words, use, False)
        tiles._own(jnp.asarray(rng.integers(-128, 128, size=(64, 64)), jnp.int8), use, False)
    assert len(captured) == 1 + 8 + 2 + 8 + 4
    for asm, arguments, twin, pack in captured:
        inputs = [r for a in arguments for r in ptx.registers(a, pack)]
        got = ptx.run_ptx(asm, *inputs)
        want = ptx.registers(twin, pack)[0]
        # Minus zero and zero are one value.
        if twin.dtype == np.float16:
            got, want = (np.stack([v & 0xFFFF, v >> 16]).astype(np.uint16).view(np.float16) for v in (got, want))
        np.testing.assert_array_equal(got, want)


def test_columns_of_any_number_of_rows():
    for columns in range(1, kernel.MOST_COLUMNS + 1):
        widths = kernel.column_widths(columns)
        assert columns <= sum(widths) < columns + 8
        assert all(launch.is_power_of_two(w) and 8 <= w <= 32 for w in widths)


def test_bad_input_is_named():
    case = CASE["rk4v4-e8"]
    _, *rest = case.arguments()

    def call(heads, dims, rows=4, format="rk4v4-e8"):
        given = jax.ShapeDtypeStruct((1, rows, heads, dims), jnp.float32)
        return jax.eval_shape(functools.partial(kernel.decode_attention, format=format), given, *rest)

    with pytest.raises(ValueError, match="head_dim 128 must be 256"):
        call(12, 128)
    with pytest.raises(ValueError, match="multiple of 2 KV heads and at most 40 for each"):
        call(13, 256)
    with pytest.raises(ValueError, match="at most 40 for each"):
        call(12, 256, rows=7)
    with pytest.raises(ValueError, match="kv format 'q4' is unknown"):
        call(12, 256, format="q4")


@functools.cache
def compiled(case, target="rtx4090"):
    return rows.measure(case, target)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_compiled_for_a_4090(case):
    """Registers, shared memory, tensor cores, traffic and the instruction budget, from the machine code for sm_89."""
    row = compiled(case)
    assert row.launches == 2
    assert row.spill_bytes == 0
    assert row.smem_bytes <= 99 * 1024
    assert row.tensor_core_instructions > 0
    # Codes arrive by 128 bits; four-bit ones become numbers without a conversion.
    wide = sum(n for op, n in row.loads.items() if op.startswith("LDGSTS") and op.endswith(".128"))
    assert wide >= 8
    if case.format.startswith("rk4v4"):
        assert row.conversions == 0
        assert row.thread_instructions_per_byte <= (10 if case.rows <= 4 else 13)
    assert row.thread_instructions_per_byte <= 30
    assert row.bytes_moved <= 1.05 * row.ideal_bytes
    assert row.limit == "memory"
    if case.format.startswith("rk4v4") and case.rows <= 4:
        assert row.blocks_per_sm >= 2


@pytest.mark.full
@pytest.mark.parametrize(
    "name,target", [("rk4v4-e8", t) for t in sorted(set(targets.names()) - {"rtx4090"})] + [("int8", "h200"), ("bf16", "h200")]
)
def test_compiles_for_other_cards(name, target):
    (case,) = (c for c in cases.CASES if c.name == name)
    row = compiled(case, target)
    assert row.tensor_core_instructions > 0
    assert row.smem_bytes <= targets.get(target).smem_per_block
