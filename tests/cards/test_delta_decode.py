"""A decode round's part of a delta layer: numbers against float64 NumPy written from the formulas, and compiled facts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ptx_machine
import pytest

from pallas_kernels import inspect, targets
from pallas_kernels.delta_decode import cases, delta_decode, kernel
from pallas_kernels.lab import rows

THREE_SLOTS = cases.SMALL[3]


def silu(x):
    return x / (1 + np.exp(-x))


def rows_of_ring(ring, slot, start, count):
    return ring[slot, (start + np.arange(count)) % ring.shape[1]]


def convolved(case, arguments):
    """SiLU of the convolution before it is rounded `[slots, rows, channels]`, and the size of what was summed."""
    projected, _, conv, _, _, start, count, taps = (np.asarray(a) for a in arguments[:8])
    projected, conv, taps = (a.astype(np.float64) for a in (projected, conv, taps))
    raw = projected[:, : case.channels].reshape(case.slots, case.rows, case.channels)
    windows = [rows_of_ring(conv, slot, start[slot] + max(count[slot], 0), case.width - 1) for slot in range(case.slots)]
    window = np.concatenate([np.stack(windows), raw], axis=1)
    terms = np.stack([window[:, i : i + case.rows] * taps[:, 0, i] for i in range(case.width)])
    return silu(terms.sum(0)), np.abs(terms).sum(0)


def oracle(case, arguments):
    """out, conv, recurrent and records in float64; the only roundings are the convolution's to bfloat16."""
    start, count = (np.asarray(a) for a in arguments[5:7])
    projected, ab, conv, state, records, _, _, _, a_log, dt_bias, norm = (np.array(a, np.float64) for a in arguments)
    lead, keys = (case.slots, case.rows), case.key_heads * case.key_dim
    mixed = convolved(case, arguments)[0].astype(ml_dtypes.bfloat16).astype(np.float64)
    q, k = mixed[..., : 2 * keys].reshape(*lead, 2, case.key_heads, case.key_dim).swapaxes(0, 2).swapaxes(1, 2)
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = mixed[..., 2 * keys :].reshape(*lead, case.value_heads, case.value_dim)
    a, b = ab.reshape(*lead, 2, case.value_heads).swapaxes(0, 2).swapaxes(1, 2)
    decay = np.exp(-np.exp(a_log) * np.logaddexp(0, a + dt_bias))
    beta = 1 / (1 + np.exp(-b))
    share = case.value_heads // case.key_heads
    out = np.zeros_like(v)
    z = projected[:, case.channels :].reshape(out.shape)

    def step(s, key, value, decay, beta):
        s *= decay
        s += np.outer(key, beta * (value - key @ s))

    for slot in np.flatnonzero(count >= 0):
        for record in rows_of_ring(records, slot, start[slot], count[slot]):
            old_k, old_v, old_decay, old_beta = parts(case, record)
            for head in range(case.value_heads):
                step(state[slot, head], old_k[head // share], old_v[head], old_decay[head], old_beta[head])
        at = start[slot] + count[slot]
        s = state[slot].copy()
        for row in range(case.rows):
            fresh = k[slot, row], v[slot, row], decay[slot, row], beta[slot, row]
            records[slot, (at + row) % case.ring] = np.concatenate([x.reshape(-1) for x in fresh])
            conv[slot, (at + case.width - 1 + row) % case.ring] = projected[slot * case.rows + row, : case.channels]
            for head in range(case.value_heads):
                step(s[head], k[slot, row, head // share], v[slot, row, head], decay[slot, row, head], beta[slot, row, head])
                x = q[slot, row, head // share] @ s[head] / np.sqrt(case.key_dim)
                out[slot, row, head] = x / np.sqrt((x**2).mean() + cases.EPS) * norm
    return (out * silu(z)).reshape(case.tokens, -1), conv, state, records


def parts(case, record):
    """k, v, decay and beta of one record, or of an array of them."""
    keys, values, heads = case.key_heads * case.key_dim, case.inner, case.value_heads
    k, v, decay, beta = np.split(record, [keys, keys + values, keys + values + heads], axis=-1)
    lead = record.shape[:-1]
    return k.reshape(*lead, case.key_heads, case.key_dim), v.reshape(*lead, heads, case.value_dim), decay, beta


def draw(case, seed=0):
    """Arguments whose convolution keeps clear of the points where bfloat16 rounds up or down: float32 and float64 agree
    there, so that everything after it can be held to float32's own error."""
    rng = np.random.default_rng(seed)
    scales = (1, 2, 1, 0.1, 0, 0, 0, 0.4, 1, 1, 0.2)
    drawn = [(scale * rng.normal(size=s.shape)).astype(s.dtype) for s, scale in zip(case.arguments(), scales, strict=True)]
    drawn[4], *drawn[5:7] = (np.asarray(case.sample_records(jax.random.key(seed))), *map(np.asarray, case.sample_waiting()))
    drawn[10] += 1
    projected = drawn[0]
    raw = projected[:, : case.channels].reshape(case.slots, case.rows, -1)
    while True:
        value, size = convolved(case, drawn)
        spacing = 2.0 ** (np.floor(np.log2(np.abs(value) + 1e-300)) - 7)
        close = np.abs(value / spacing % 1 - 0.5) * spacing < 2e-6 * np.abs(value) + 1e-6 * size
        slot, channel = np.nonzero(close.any(1))
        if not len(slot):
            return [jnp.asarray(a) for a in drawn]
        raw[slot, :, channel] = rng.normal(size=(len(slot), case.rows)).astype(raw.dtype)
        projected[:, : case.channels] = raw.reshape(case.tokens, -1)


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def bits(tree):
    return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def assert_same_bits(got, want):
    for x, y in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(case, got, arguments):
    out, conv, state, records = got
    want = oracle(case, arguments)
    for array, right in zip(got, want, strict=True):
        assert array.shape == right.shape
    assert out.dtype == jnp.bfloat16 and records.dtype == state.dtype == jnp.float32
    assert relative(out, want[0]) <= 4e-3
    np.testing.assert_array_equal(np.asarray(conv, np.float64), want[1])
    assert relative(state, want[2]) <= 1e-5
    for name, ours, theirs in zip(("k", "v", "decay", "beta"), parts(case, np.asarray(records)), parts(case, want[3]), strict=True):
        assert relative(ours, theirs) <= 1e-5, name


def check(case, arguments):
    got = case.call(*arguments, interpret=True)
    assert_close(case, got, arguments)
    return got


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_kernel_against_float64(case):
    check(case, draw(case))


@pytest.mark.parametrize("start", range(8))
def test_anywhere_in_the_ring_with_any_number_of_rows_waiting(start):
    """Three slots: none, one or more rows wait, in every place of rings of eight rows. Slots where none do keep S."""
    arguments = draw(THREE_SLOTS, seed=3)
    assert THREE_SLOTS.ring == 8
    arguments[5] = jnp.array([start, start + 3, start + 5], jnp.int32) % 8
    arguments[6] = jnp.array([start % 5, 0, 4], jnp.int32)
    _, _, state, _ = check(THREE_SLOTS, arguments)
    assert_same_bits(state[1], arguments[3][1])


def test_xla_form_against_float64():
    arguments = draw(THREE_SLOTS, seed=4)
    arguments[6] = arguments[6].at[1].set(-1)
    got = delta_decode(*arguments, jnp.int32(0), rows=THREE_SLOTS.rows, eps=cases.EPS, impl="xla")
    assert_close(THREE_SLOTS, got, arguments)


def test_compiled_kernel_against_float64():
    """The code for the 4090, executed here: a full ring that wraps, and a slot that takes no part."""
    case = cases.Case("", slots=3, rows=4, key_heads=1, value_heads=3)
    arguments = draw(case)
    arguments[5:7] = jnp.array([7, 2, 5], jnp.int32), jnp.array([4, 1, -1], jnp.int32)
    assert_close(case, ptx_machine.call(case, arguments, grid=(3, 3)), arguments)


@pytest.mark.bits
def test_a_slot_that_takes_no_part_keeps_its_bits():
    """Of three slots the middle one; it may hold anything. Its rows come out as zeros."""
    arguments = draw(THREE_SLOTS, seed=5)
    want = THREE_SLOTS.call(*arguments, interpret=True)
    arguments[6] = arguments[6].at[1].set(-1)
    for at in (2, 3, 4):
        arguments[at] = arguments[at].at[1].set(jnp.nan)
    out, *left = THREE_SLOTS.call(*arguments, interpret=True)
    assert (np.asarray(out[4:8]) == 0).all()
    assert_same_bits([x[1] for x in left], [arguments[at][1] for at in (2, 3, 4)])
    for slot in (0, 2):
        assert_same_bits([out[4 * slot :][:4], *(x[slot] for x in left)], [want[0][4 * slot :][:4], *(x[slot] for x in want[1:])])


@pytest.mark.bits
def test_rows_that_do_not_wait_are_not_read():
    """NaN in all records but the two that wait, and in all raw inputs but the window, changes no bit of what matters."""
    case = cases.SMALL[1]
    arguments = draw(case, seed=6)
    arguments[5:7] = jnp.array([6], jnp.int32), jnp.array([2], jnp.int32)
    want = case.call(*arguments, interpret=True)
    waiting, window = (jnp.array([6, 7]), jnp.array([0, 1, 2]))  # from row 6 on of 8; the window of the new rows behind them
    for at, kept in ((4, waiting), (2, window)):
        arguments[at] = jnp.full_like(arguments[at], jnp.nan).at[:, kept].set(arguments[at][:, kept])
    out, conv, state, records = case.call(*arguments, interpret=True)
    assert_same_bits((out, state, records[:, :4], conv[:, 3:7]), (want[0], want[2], want[3][:, :4], want[1][:, 3:7]))


def test_gates_at_their_ends_and_inputs_of_zero():
    """Decay from 0 to 1, beta from 0 to 1, q, k and v of zero: nothing overflows, nothing is divided by zero."""
    projected, ab, conv, *rest = draw(THREE_SLOTS, seed=1)
    ab = ab.at[:, : THREE_SLOTS.value_heads].multiply(40).at[:, THREE_SLOTS.value_heads :].multiply(60)
    projected, conv = projected.at[:4, : THREE_SLOTS.channels].set(0), conv.at[0].set(0)
    out, _, _, records = check(THREE_SLOTS, [projected, ab, conv, *rest])
    start, count = (np.asarray(x) for x in rest[2:4])
    fresh = np.stack([rows_of_ring(np.asarray(records), slot, start[slot] + count[slot], 4) for slot in range(3)])
    k, _, decay, beta = parts(THREE_SLOTS, fresh)
    assert (k[0] == 0).all() and np.isfinite(np.asarray(out, np.float32)).all()
    assert decay.min() == 0 and decay.max() == 1 and beta.max() == 1


@pytest.mark.bits
def test_a_row_has_the_same_bits_in_any_company():
    """The first row alone, and beside three others; a slot alone, and beside two others that hold NaN."""
    case = THREE_SLOTS
    arguments = draw(case, seed=2)
    out, conv, state, records = case.call(*arguments, interpret=True)
    first = [a.reshape(3, 4, -1)[:, 0] for a in arguments[:2]]
    alone = kernel.delta_decode(*first, *arguments[2:], rows=1, eps=cases.EPS, interpret=True)
    at = (arguments[5] + arguments[6]) % case.ring
    row = jnp.arange(3), at
    assert_same_bits((alone[0], alone[2], alone[3][row]), (out.reshape(3, 4, -1)[:, 0], state, records[row]))

    poisoned = [a.reshape(3, a.shape[0] // 3, *a.shape[1:]).at[::2].set(jnp.nan).reshape(a.shape) for a in arguments[:5]]
    got = case.call(*poisoned, *arguments[5:], interpret=True)
    assert_same_bits((got[0][4:8], *(x[1] for x in got[1:])), (out[4:8], conv[1], state[1], records[1]))


def test_bad_input_is_named():
    for change, message in (
        (dict(key_dim=96), "delta_decode: recurrent has key_dim 96, a power of two from 32 to 256 is needed"),
        (dict(value_dim=16), "delta_decode: recurrent has value_dim 16, a power of two from 32 to 256 is needed"),
        (dict(rows=7), "delta_decode: rows 7, from 1 to 6 are allowed"),
        (dict(rows=0), "delta_decode: rows 0, from 1 to 6 are allowed"),
    ):
        case = dataclasses.replace(THREE_SLOTS, **change)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(case.call, *case.arguments())


@functools.cache
def compiled(case, target="rtx4090"):
    return rows.measure(case, target)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_compiled_for_a_4090(case):
    row = compiled(case)
    assert row.launches == 1
    assert row.spill_bytes == 0
    assert row.smem_bytes <= 99 * 1024
    assert row.bytes_moved <= 1.05 * row.ideal_bytes
    # The state arrives and leaves by 128-bit accesses, one pass of each: nothing is read or written twice. A record of k and
    # v, two more at most, goes beside it.
    each = case.state_bytes // (16 * row.threads * row.blocks)
    assert each <= row.loads["LDG.E.128"] <= each + 2 and row.loads["STG.E.128"] == each
    assert row.thread_instructions_per_byte <= 2 + 2 * case.rows
    assert row.limit == "memory"


def test_states_and_rings_change_in_place():
    case = cases.CASES[3]
    report = inspect.report(case.call, case.arguments(), donate=case.donate)
    assert report.copies == 0 and report.temporary_bytes == 0
    assert report.aliased_bytes == case.state_bytes + sum(case.ring_bytes())


@pytest.mark.full
@pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
def test_compiles_for_other_cards(target):
    row = compiled(cases.CASES[1], target)
    assert row.spill_bytes == 0 and row.launches == 1
    assert row.smem_bytes <= targets.get(target).smem_per_block
