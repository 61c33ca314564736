"""Prefill through the delta rule: numbers against a float64 recurrence, what must not change, and compiled facts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import inspect, targets
from pallas_kernels.delta_prefill import cases, chunk_kernel, delta_prefill, inputs_kernel, kernel, parts
from pallas_kernels.lab import rows

# The shape of the tests that compare bits: three value heads a key head, a block half full, three slots.
EDGE = dataclasses.replace(cases.SMALL[2], count=100)
PROJECTED, AB, CONV, RECURRENT, TAPS, A_LOG, DT_BIAS, NORM, SLOT, COUNT = range(10)


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def draw(case, kind="plain", seed=0):
    """Arguments of a case. Log-decays from -0.01 to -3, and by `kind` what is hard for a chunked form."""
    rng = np.random.default_rng(seed)
    heads = case.value_heads
    x = rng.normal(size=(case.tokens, case.channels + case.inner))
    ab = rng.normal(size=(case.tokens, 2 * heads)) * 2
    a_log, dt_bias = rng.uniform(-3, 1, heads), rng.normal(size=heads)
    if kind == "repeated keys":  # I + A is all but singular in float32's eyes: its powers reach 1e18
        x[:, : 2 * case.key_heads * case.dim] = x[0, : 2 * case.key_heads * case.dim]
        a_log[:], ab[:, heads:] = -9, 6
    elif kind == "g = -50":  # and every seventh token of the first head does not decay at all
        a_log[:], dt_bias[:], ab[:, :heads] = 0, 0, 50
        ab[::7, 0] = -90
    elif kind == "g = 0":
        ab[:, :heads] = -200
    elif kind == "beta = 0":
        ab[:, heads:] = -200
    return [
        jnp.asarray(x, jnp.bfloat16),
        jnp.asarray(ab, jnp.bfloat16),
        jnp.asarray(rng.normal(size=(case.slots, case.width - 1, case.channels)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(case.slots, heads, case.dim, case.dim)) / 4, jnp.float32),
        jnp.asarray(rng.normal(size=(case.channels, 1, case.width)) / 2, jnp.float32),
        jnp.asarray(a_log, jnp.float32),
        jnp.asarray(dt_bias, jnp.float32),
        jnp.asarray(1 + rng.normal(size=case.dim) / 5, jnp.float32),
        jnp.int32(case.slots - 1),
        jnp.int32(case.count),
    ]


def run(arguments):
    return kernel.delta_prefill(*arguments, eps=cases.EPS, interpret=True)


def silu(x):
    return x / (1 + np.exp(-x))


def check_mixed(case, arguments):
    """The convolution, which must be rounded as its exact value is, and the window; returns its values in float64.

    A sum that lies half way between two bf16 numbers may go either way in float32, so the recurrence starts from here.
    """
    number = [arguments[i].reshape(1) for i in (SLOT, COUNT)]
    got = inputs_kernel.token_inputs(
        *(arguments[i] for i in (PROJECTED, AB, CONV, TAPS, A_LOG, DT_BIAS)),
        *number,
        key_heads=case.key_heads,
        dim=case.dim,
        interpret=True,
    )
    raw = np.asarray(arguments[PROJECTED], np.float64)[:, : case.channels]
    window = np.concatenate([np.asarray(arguments[CONV], np.float64)[case.slots - 1], raw])
    taps = np.asarray(arguments[TAPS], np.float64)[:, 0]
    want = silu(sum(window[i : i + case.tokens] * taps[:, i] for i in range(case.width)))[: case.count]
    mixed = np.asarray(got.mixed, np.float64)
    half_step = np.abs(want) * 2**-8
    assert np.all(np.abs(mixed[: case.count] - want) <= half_step * 1.001 + 2e-6)
    assert not mixed[case.count :].any()
    np.testing.assert_array_equal(np.asarray(got.window, np.float64), window[case.count : case.count + case.width - 1])
    return mixed


def oracle(case, mixed, arguments):
    """Token after token: S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q; then the gated norm. Float64."""
    heads, dim = case.value_heads, case.dim
    share = heads // case.key_heads
    q, k, v = np.split(mixed.reshape(case.tokens, -1, dim), [case.key_heads, 2 * case.key_heads], axis=1)
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), share, axis=1) for x in (q, k))
    ab, a_log, dt_bias, norm = (np.asarray(arguments[i], np.float64) for i in (AB, A_LOG, DT_BIAS, NORM))
    decay = np.exp(-np.exp(a_log) * np.logaddexp(0, ab[:, :heads] + dt_bias))
    beta = 1 / (1 + np.exp(-ab[:, heads:]))
    state = np.array(arguments[RECURRENT][case.slots - 1], np.float64)
    out = np.zeros((case.tokens, heads, dim))
    for t in range(case.count):
        state = decay[t][:, None, None] * state
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * update[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t]) * dim**-0.5
    z = np.asarray(arguments[PROJECTED], np.float64)[:, case.channels :].reshape(out.shape)
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + cases.EPS)
    normed = normed.astype(ml_dtypes.bfloat16).astype(np.float64) * norm * silu(z)
    return normed.reshape(case.tokens, -1), state


def check(case, arguments):
    mixed = check_mixed(case, arguments)
    out, conv, recurrent = run(arguments)
    want, state = oracle(case, mixed, arguments)
    slot = case.slots - 1
    assert relative(recurrent[slot], state) <= 5e-7  # float32, as good as it gets
    assert relative(out[: case.count], want[: case.count]) <= 2e-3  # two roundings to bf16 are 1.6e-3
    assert not np.asarray(out[case.count :], np.float32).any()
    # The window is what the convolution has seen last; the other slots keep every bit.
    window = np.concatenate([arguments[CONV][slot], arguments[PROJECTED][:, : case.channels]])
    np.testing.assert_array_equal(bits(conv[slot]), bits(window[case.count : case.count + case.width - 1]))
    for got, old in ((conv, arguments[CONV]), (recurrent, arguments[RECURRENT])):
        np.testing.assert_array_equal(bits(got[:slot]), bits(old[:slot]))


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_kernel_against_float64(case):
    check(case, draw(case))


@pytest.mark.parametrize("kind", ["repeated keys", "g = -50", "g = 0", "beta = 0"])
def test_hard_inputs(kind):
    check(EDGE, draw(EDGE, kind))


@pytest.mark.parametrize("count", [2, 64, 128])
def test_counts_at_the_edges(count):
    case = dataclasses.replace(EDGE, count=count)
    check(case, draw(case))


@pytest.mark.bits
def test_no_token_changes_no_bit():
    arguments = draw(dataclasses.replace(EDGE, count=0))
    arguments[RECURRENT] = arguments[RECURRENT].at[:, :, ::3].set(-0.0)
    out, conv, recurrent = run(arguments)
    np.testing.assert_array_equal(bits(recurrent), bits(arguments[RECURRENT]))
    np.testing.assert_array_equal(bits(conv), bits(arguments[CONV]))
    assert not np.asarray(out, np.float32).any()


@pytest.mark.bits
def test_cutting_a_sequence_changes_no_bit():
    cut = 64
    arguments = draw(EDGE)
    whole = run(arguments)
    first = [a[:cut] for a in arguments[:2]] + arguments[2:9] + [jnp.int32(cut)]
    out, conv, recurrent = run(first)
    second = [a[cut:] for a in arguments[:2]] + [conv, recurrent] + arguments[4:9] + [jnp.int32(EDGE.count - cut)]
    rest, conv, recurrent = run(second)
    for got, want in zip((jnp.concatenate([out, rest]), conv, recurrent), whole, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.bits
@pytest.mark.parametrize("poison", [np.nan, np.inf, -3e38])
def test_what_lies_outside_changes_no_bit(poison):
    """Tokens of padding, and everything of the other slots."""
    arguments = draw(EDGE)
    want = run(arguments)
    for i in (PROJECTED, AB):
        arguments[i] = arguments[i].at[EDGE.count :].set(poison)
    for i in (CONV, RECURRENT):
        arguments[i] = arguments[i].at[: EDGE.slots - 1].set(poison)
    out, conv, recurrent = run(arguments)
    np.testing.assert_array_equal(bits(out), bits(want[0]))
    for got, clean, given in ((conv, want[1], arguments[CONV]), (recurrent, want[2], arguments[RECURRENT])):
        np.testing.assert_array_equal(bits(got[-1]), bits(clean[-1]))
        np.testing.assert_array_equal(bits(got[:-1]), bits(given[:-1]))


def test_parts_add_up():
    x = (np.random.default_rng(0).normal(size=1000) * 10.0 ** np.arange(-25, 25).repeat(20)).astype(np.float32)
    for count, left in ((3, 0.0), (2, 2.0**-16)):
        found = sum(np.asarray(p, np.float64) for p in parts.split(jnp.asarray(x), count))
        assert np.all(np.abs(found - x) <= left * np.abs(x))
    assert [parts.dots(*n) for n in ((3, 1), (3, 3), (2, 2), (2, 1))] == [3, 6, 3, 2]


def test_the_inverse_where_powers_explode():
    """Ones below the diagonal: (I + A)^-1 has one off-diagonal of -1, the powers of A go up to binomial(31, 15)."""
    a = jnp.tril(jnp.ones((32, 32)), -1)
    want = np.eye(32) - np.eye(32, k=-1)
    np.testing.assert_array_equal(chunk_kernel.unit_lower_inverse(a), want)
    random = np.random.default_rng(3).normal(size=(32, 32)).astype(np.float32) / 3
    want = np.linalg.inv(np.eye(32) + np.tril(random.astype(np.float64), -1))
    assert relative(chunk_kernel.unit_lower_inverse(jnp.asarray(random)), want) < 1e-6


def test_bad_input_is_named():
    arguments = draw(EDGE)
    wide = list(arguments)
    wide[PROJECTED] = wide[PROJECTED].astype(jnp.float32)
    with pytest.raises(ValueError, match="projected float32 and conv bfloat16 must be bfloat16 on a GPU"):
        run(wide)
    short = [a[:96] for a in arguments[:2]] + arguments[2:]
    with pytest.raises(ValueError, match="projected has 96 tokens, a multiple of 64 is needed"):
        run(short)
    flat = list(arguments)
    flat[RECURRENT] = jnp.zeros((3, 3, 32, 64))
    with pytest.raises(ValueError, match="head dims 32 and 64; on a GPU both are 64 or both 128"):
        run(flat)


def test_public_function_on_a_cpu():
    arguments = draw(EDGE)
    got = jax.jit(functools.partial(delta_prefill, eps=cases.EPS))(*arguments)
    out, conv, recurrent = run(arguments)
    assert relative(out[: EDGE.count], np.asarray(got[0], np.float64)[: EDGE.count]) < 4e-3
    np.testing.assert_array_equal(bits(conv), bits(got[1]))
    assert relative(recurrent, np.asarray(got[2], np.float64)) < 1e-4


@functools.cache
def compiled(case, target="rtx4090"):
    return inspect.report(case.call, case.arguments(), target, donate=case.donate)


def check_code(report, card):
    for launched in report.kernels.values():
        assert launched.spill_bytes == 0, launched.name
        assert launched.smem_bytes <= card.smem_per_block, launched.name
        # No access to shared or local memory by bytes.
        assert not launched.count("LDS.U", "LDS.S", "LDL", "STL"), launched.name


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_compiled_for_a_4090(case):
    """Four launches and the window's update, in place; scratch, tensor cores and instructions from the machine code."""
    report = compiled(case)
    check_code(report, targets.get("rtx4090"))
    assert (report.launches, report.copies) == (5, 0)
    assert report.aliased_bytes == case.slots * case.slot_bytes
    assert case.moved_bytes(report) <= 1.02 * (case.ideal_bytes + 2 * case.scratch_bytes)
    assert report.temporary_bytes <= 100 * 2**20 * case.tokens // 1024

    blocks, state = (report.kernels[f"delta_prefill_{name}"] for name in ("blocks", "state"))
    for launched, passes in ((blocks, 4), (state, case.tokens // inputs_kernel.BLOCK)):
        warps = launched.blocks * launched.threads // 32
        (loop,) = launched.loops
        straight = inspect.count(launched.straight, *inspect.TENSOR_OPS)
        assert (straight + passes * loop.tensor_ops) * warps == case.tensor_ops_by_launch()[launched.name]
        # A warp of an RTX 4090 gets a tensor-core instruction done every 32 clocks, others every clock.
        assert loop.instructions <= 8 * loop.tensor_ops
    assert rows.main_kernel(report) is blocks and rows.loop_trips(blocks, case) == [4]
    # Memory speed leaves 16,384 threads x 2.52 GHz / 1008 GB/s = 41 instructions a byte; every branch is counted as taken.
    for name, moved in (("inputs", 4 * case.channels), ("norm", 8 * case.inner)):
        launched = report.kernels[f"delta_prefill_{name}"]
        instructions = launched.executed(trips=()) * launched.threads * launched.blocks
        assert instructions <= 25 * moved * case.tokens, name
        assert launched.count("LDG.E.128") >= 12, name


@pytest.mark.full
@pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
def test_compiles_for_other_cards(target):
    check_code(compiled(cases.CASES[2], target), targets.get(target))
