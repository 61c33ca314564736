"""Decode rows of a delta layer: numbers against float64 NumPy written from the formulas, and compiled facts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ptx_machine
import pytest

from pallas_kernels import inspect, targets
from pallas_kernels.delta_decode import cases, kernel
from pallas_kernels.lab import rows

THREE_SLOTS = cases.SMALL[3]


def silu(x):
    return x / (1 + np.exp(-x))


def convolved(case, arguments):
    """SiLU of the convolution before it is rounded `[slots, rows, channels]`, and the size of what was summed."""
    projected, _, conv, _, taps = (np.asarray(a, np.float64) for a in arguments[:5])
    raw = projected[:, : case.channels].reshape(case.slots, case.rows, case.channels)
    window = np.concatenate([conv, raw], axis=1)
    terms = np.stack([window[:, i : i + case.rows] * taps[:, 0, i] for i in range(case.width)])
    return silu(terms.sum(0)), np.abs(terms).sum(0)


def oracle(case, arguments):
    """out, k, v, decay, beta in float64; the only roundings are the convolution's to bfloat16."""
    projected, ab, _, state, _, a_log, dt_bias, norm = (np.asarray(a, np.float64) for a in arguments)
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
    for slot in range(case.slots):
        s = state[slot].copy()
        for row in range(case.rows):
            for head in range(case.value_heads):
                key = k[slot, row, head // share]
                s[head] *= decay[slot, row, head]
                s[head] += np.outer(key, beta[slot, row, head] * (v[slot, row, head] - key @ s[head]))
                x = q[slot, row, head // share] @ s[head] / np.sqrt(case.key_dim)
                out[slot, row, head] = x / np.sqrt((x**2).mean() + cases.EPS) * norm
    z = projected[:, case.channels :].reshape(out.shape)
    return (out * silu(z)).reshape(case.tokens, -1), (k, v, decay, beta)


def draw(case, seed=0):
    """Arguments whose convolution keeps clear of the points where bfloat16 rounds up or down: float32 and float64 agree
    there, so that everything after it can be held to float32's own error."""
    rng = np.random.default_rng(seed)
    projected, ab, conv, state, taps, a_log, dt_bias, norm = (
        (scale * rng.normal(size=s.shape)).astype(s.dtype)
        for s, scale in zip(case.arguments(), (1, 2, 1, 0.1, 0.4, 1, 1, 0.2))
    )
    raw = projected[:, : case.channels].reshape(case.slots, case.rows, -1)
    while True:
        value, size = convolved(case, (projected, ab, conv, state, taps))
        spacing = 2.0 ** (np.floor(np.log2(np.abs(value) + 1e-300)) - 7)
        close = np.abs(value / spacing % 1 - 0.5) * spacing < 2e-6 * np.abs(value) + 1e-6 * size
        slot, channel = np.nonzero(close.any(1))
        if not len(slot):
            return [jnp.asarray(a) for a in (projected, ab, conv, state, taps, a_log, dt_bias, 1 + norm)]
        raw[slot, :, channel] = rng.normal(size=(len(slot), case.rows)).astype(raw.dtype)
        projected[:, : case.channels] = raw.reshape(case.tokens, -1)


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def bits(tree):
    return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def assert_same_bits(got, want):
    for x, y in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(x, y)


def check(case, arguments):
    out, records = case.call(*arguments, interpret=True)
    want, want_records = oracle(case, arguments)
    assert out.shape == want.shape and out.dtype == jnp.bfloat16
    assert relative(out, want) <= 4e-3
    for name, got, right in zip(records._fields, records, want_records):
        assert got.shape == right.shape and got.dtype == jnp.float32, name
        assert relative(got, right) <= 1e-5, name
    return out, records


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_kernel_against_float64(case):
    check(case, draw(case))


def test_compiled_kernel_against_float64():
    """The code for the 4090, executed here."""
    case = cases.Case("", slots=2, rows=4, key_heads=2, value_heads=4)
    arguments = draw(case)
    out, records = ptx_machine.call(case, arguments, grid=(4, 2))
    want, want_records = oracle(case, arguments)
    assert relative(out, want) <= 4e-3
    for got, right in zip(records, want_records):
        assert relative(got, right) <= 1e-5


def test_gates_at_their_ends_and_inputs_of_zero():
    """Decay from 0 to 1, beta from 0 to 1, q, k and v of zero: nothing overflows, nothing is divided by zero."""
    projected, ab, conv, *rest = draw(THREE_SLOTS, seed=1)
    ab = ab.at[:, : THREE_SLOTS.value_heads].multiply(40).at[:, THREE_SLOTS.value_heads :].multiply(60)
    nothing = projected.at[:4, : THREE_SLOTS.channels].set(0), conv.at[0].set(0)
    out, records = check(THREE_SLOTS, [nothing[0], ab, nothing[1], *rest])
    assert (np.asarray(records.k[0]) == 0).all() and np.isfinite(np.asarray(out, np.float32)).all()
    assert records.decay.min() == 0 and records.decay.max() == 1 and records.beta.max() == 1


def test_a_row_has_the_same_bits_in_any_company():
    """The first row alone, and beside three others; a slot alone, and beside two others that hold NaN."""
    arguments = draw(THREE_SLOTS, seed=2)
    out, records = THREE_SLOTS.call(*arguments, interpret=True)
    first = [a.reshape(3, 4, -1)[:, 0] for a in arguments[:2]]
    alone = kernel.delta_decode(*first, *arguments[2:], rows=1, eps=cases.EPS, interpret=True)
    assert_same_bits(alone, (out.reshape(3, 4, -1)[:, 0], jax.tree.map(lambda x: x[:, :1], records)))

    poisoned = [a.reshape(3, a.shape[0] // 3, *a.shape[1:]).at[::2].set(jnp.nan).reshape(a.shape) for a in arguments[:4]]
    got = THREE_SLOTS.call(*poisoned, *arguments[4:], interpret=True)
    want = out.reshape(3, 4, -1)[1], jax.tree.map(lambda x: x[1], records)
    assert_same_bits((got[0].reshape(3, 4, -1)[1], jax.tree.map(lambda x: x[1], got[1])), want)


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
    # The state arrives by 128-bit loads, one pass of them: nothing is read twice.
    assert row.loads["LDG.E.128"] * 16 * row.threads * row.blocks == case.state_bytes
    assert row.thread_instructions_per_byte <= 4 + 3 * case.rows
    assert row.limit == "memory"


def test_the_state_is_only_read():
    case = cases.CASES[0]
    report = inspect.report(case.call, case.arguments())
    (only,) = report.kernels.values()
    assert report.copies == 0 and report.temporary_bytes == 0
    assert report.output_bytes < case.state_bytes / 50
    assert only.count("STG") * only.threads < case.key_dim * case.value_dim / 4


@pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
def test_compiles_for_other_cards(target):
    row = compiled(cases.CASES[1], target)
    assert row.spill_bytes == 0 and row.launches == 1
    assert row.smem_bytes <= targets.get(target).smem_per_block
