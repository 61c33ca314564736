"""Quantised projections: numbers against float64 NumPy that decodes the storage by its description, and compiled facts."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul, targets
from pallas_kernels.lab import rows
from pallas_kernels.matmul import cases, kernel, quantised

BF16 = jnp.bfloat16


def stored_codes(weight):
    """Codes and scales read word by word from the documented order, `[padded K, padded N]`."""
    words = np.asarray(weight.words).view(np.uint16)
    planes, rows, columns = 16 // weight.bits, weight.words.shape[0] * 32, weight.words.shape[1] // 32
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    within = row % 32
    at = (column // 8) * 256 + (column % 8) * 32 + (within % 8 // 2) * 8 + within // 16 * 4 + within % 16 // 8 * 2 + row % 2
    word = words[row // 32, at].reshape(-1, weight.group, columns).astype(np.int64)
    codes = np.stack([(word >> (weight.bits * p)) % 2**weight.bits for p in range(planes)], axis=1)
    codes = codes.reshape(-1, columns)
    return np.where(codes >= 2 ** (weight.bits - 1), codes - 2**weight.bits, codes), stored_scales(weight)


def stored_scales(weight):
    """Scales x unit read byte by byte, `[padded K / G, padded N]`."""
    planes = 16 // weight.bits
    words = np.asarray(weight.scales).astype(np.int64)
    scales = np.stack([(words >> (8 * p)) % 256 - 128 for p in range(planes)], axis=1).reshape(-1, words.shape[1])
    return scales * np.asarray(weight.unit, np.float64)


def oracle(x, weight, norm=None, residual=None, *, swiglu=False, eps=1e-6):
    codes, scales = stored_codes(weight)
    w = (codes * np.repeat(scales, weight.group, axis=0))[: weight.shape[0], : weight.shape[1]]
    h = np.asarray(x, np.float64)
    if norm is not None:
        h = h / np.sqrt((h**2).mean(1, keepdims=True) + eps) * (1 + np.asarray(norm, np.float64))
    y = h @ w
    if swiglu:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    return y if residual is None else y + np.asarray(residual, np.float64)


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def draw(case, seed=0):
    """x, weight, norm, residual for a case; activations with a few large channels, as the model has."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(case.rows, case.k)) * np.where(rng.random(case.k) < 0.02, 20, 1)
    w = rng.normal(size=(case.k, case.n)) * rng.uniform(0.5, 2, size=(1, case.n)) / np.sqrt(case.k)
    weight = matmul.quantise(jnp.asarray(w, jnp.float32), bits=case.bits, group=case.group)
    norm = jnp.asarray(rng.normal(size=case.k) * 0.2, BF16) if case.norm else None
    residual = jnp.asarray(rng.normal(size=(case.rows, case.out_columns)), BF16) if case.residual else None
    return jnp.asarray(x, BF16), weight, norm, residual


@pytest.mark.parametrize("case", [c for c in cases.SMALL if c.op == "quantised_matmul"], ids=lambda c: c.name)
def test_kernel_against_float64(case):
    arguments = draw(case)
    got = case.call(*arguments, interpret=True)
    want = oracle(*arguments, swiglu=case.swiglu)
    assert got.shape == want.shape
    assert relative(got, want) <= (4e-2 if case.activations == "int8" else 4e-3)


@pytest.mark.parametrize("bits,group", [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)])
def test_decode_sums_are_exact_products(bits, group):
    """Without a norm nothing but the sum itself is rounded: codes reach the tensor cores exactly."""
    case = cases.Case("", 512, 128, bits=bits, group=group)
    x, weight, _, _ = draw(case)
    got = kernel.decode(x, weight, out_dtype=jnp.float32, interpret=True)
    assert relative(got, oracle(x, weight)) < 1e-6


@pytest.mark.bits
def test_a_row_has_the_same_bits_in_any_company():
    case = cases.Case("", 300, 128, norm=True, residual=True)
    x, weight, norm, residual = draw(case)
    together = kernel.decode(x, weight, norm, residual, interpret=True)
    for count in (1, 3, 8):
        alone = kernel.decode(x[:count], weight, norm, residual[:count], interpret=True)
        np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(together[:count], np.float32))


@pytest.mark.bits
@pytest.mark.parametrize("rows", [3, 40])
def test_padding_is_never_read_into_a_result(rows):
    """Codes in padded rows of K and units of padded columns are poisoned; rows of x in no block are absent anyway."""
    case = cases.Case("", 200, 100, rows=rows)
    x, weight, _, _ = draw(case)
    poisoned = poison(weight)
    got, want = (case.call(x, w, None, None, interpret=True) for w in (poisoned, weight))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def poison(weight):
    """The same weight but for what lies in its padding: codes of 7 in rows, units of NaN in columns."""
    codes, _ = map(np.array, quantised.unpack(weight))
    codes[weight.shape[0] :] = 7
    scales = jnp.ones((codes.shape[0] // weight.group, codes.shape[1]))
    words = quantised.pack(jnp.asarray(codes, jnp.int8), scales, bits=weight.bits).words
    assert words.shape == weight.words.shape
    return dataclasses.replace(weight, words=words, unit=weight.unit.at[weight.shape[1] :].set(jnp.nan))


def test_quantise_finds_better_scales_than_the_largest_magnitude_does():
    rng = np.random.default_rng(1)
    w = rng.normal(size=(256, 64)).astype(np.float32)
    by_peak = np.abs(w.reshape(4, 64, 64)).max(1)[:, None] / 7
    plain = np.clip(np.round(w.reshape(4, 64, 64) / by_peak), -8, 7) * by_peak
    for bits, gain in ((4, 0.86), (8, 0.08)):
        error = np.asarray(matmul.dequantise(matmul.quantise(jnp.asarray(w), bits=bits))) - w
        assert np.linalg.norm(error) < gain * np.linalg.norm(plain.reshape(w.shape) - w)


def test_quantise_keeps_zeros_and_representable_matrices():
    """Whole units, of which a column's largest scale has 127: nothing is left but the unit's own rounding."""
    codes = np.random.default_rng(2).integers(-7, 8, size=(256, 64))
    codes[::64] = 7
    scales = np.array([127, 3, 40, 127])[:, None] * np.linspace(0.01, 2, 64)
    exact = (codes * np.repeat(scales, 64, axis=0)).astype(np.float32)
    exact[:, :8], exact[64:128, 8:16] = 0, 0
    for padded in (exact, exact[:200, :50]):
        weight = matmul.quantise(jnp.asarray(padded))
        np.testing.assert_allclose(matmul.dequantise(weight), padded, rtol=3e-7, atol=0)
        for array in (weight.unit[:8], weight.unit[padded.shape[1] :], quantised.unpack(weight)[1][-(-padded.shape[0] // 64) :]):
            assert not np.asarray(array).any()


def test_candidates_are_judged_as_they_are_stored():
    """A group of small weights beside large ones has a handful of scales to choose from: none that is a candidate does better."""
    w = np.random.default_rng(3).normal(size=(128, 40)).astype(np.float32)
    w[64:] *= 0.02
    weight = matmul.quantise(jnp.asarray(w))
    small, unit = w[64:].astype(np.float64), np.asarray(weight.unit, np.float64)[:40]
    found = ((np.asarray(matmul.dequantise(weight)) - w)[64:] ** 2).sum(0)
    peak = np.abs(small).max(0)
    tried = 0
    for scale in (-4, -3, -2, -1, 1, 2, 3, 4):
        # The largest magnitude at 0.7 to 1.0 of the range, in whole units; only a positive one has a negative scale.
        ends = np.rint(np.outer((0.7, 1.0), peak) / (7 if scale > 0 else 8) / unit)
        candidate = (ends[0] <= abs(scale)) & (abs(scale) <= np.maximum(ends[1], 1)) & ((scale > 0) | (small.max(0) == peak))
        other = ((np.clip(np.rint(small / (scale * unit)), -8, 7) * scale * unit - small) ** 2).sum(0)
        assert (found[candidate] <= other[candidate] * (1 + 1e-5)).all()
        tried += candidate.sum()
    assert tried > 2 * 40


@pytest.mark.parametrize("tails", ["normal", "standard_t"])
def test_eight_bits_in_wide_groups_are_far_below_the_noise_of_four(tails):
    """By 15 dB at least, also where some weights are many times the others."""
    rng = np.random.default_rng(5)
    w = np.asarray(rng.normal(size=(1024, 128)) if tails == "normal" else rng.standard_t(3, size=(1024, 128)), np.float32)
    made = [matmul.quantise(jnp.asarray(w), bits=bits, group=group) for bits, group in ((4, 64), (8, 128))]
    four, eight = (np.linalg.norm(matmul.dequantise(q) - w) for q in made)
    assert 20 * np.log10(four / eight) > 15


@pytest.mark.parametrize("spread", [1.0, 0.3, 0.0])
def test_scales_of_others_are_rounded_to_the_nearest_step(spread):
    """The squared error of a kept column is what rounding to a 127th of its largest scale costs: a twelfth of a step each."""
    rng = np.random.default_rng(4)
    codes = rng.integers(-8, 8, size=(64 * 96, 32)).astype(np.int8)
    scales = rng.uniform(1 - spread, 1, size=(96, 32)).astype(np.float32) * np.geomspace(1e-4, 1, 32).astype(np.float32)
    got = np.asarray(matmul.dequantise(matmul.pack(jnp.asarray(codes), jnp.asarray(scales), bits=4)), np.float64)
    each = codes.astype(np.float64).reshape(96, 64, 32)
    error = ((got - (each * scales[:, None]).reshape(got.shape)) ** 2).reshape(96, 64, 32)
    step = scales.max(0).astype(np.float64) / 127
    assert (error.max(1) <= (0.5001 * step) ** 2 * 64).all()
    expected = (each**2).sum((0, 1)) * step**2 / 12
    if spread:
        np.testing.assert_allclose((error.sum((0, 1)) / expected).mean(), 1, atol=0.1)
    else:
        assert (error.sum((0, 1)) < 1e-3 * expected).all()


def test_projections_of_one_input_side_by_side():
    case = cases.Case("", 300, 128)
    x, first, _, _ = draw(case)
    second = draw(dataclasses.replace(case, n=70), seed=1)[1]
    both = matmul.concatenate([first, second])
    assert both.shape == (300, 198)
    want = np.concatenate([oracle(x, first), oracle(x, second)], axis=1)
    assert relative(kernel.decode(x, both, interpret=True), want) < 4e-3
    with pytest.raises(ValueError, match="70 columns before the last weight"):
        matmul.concatenate([second, first])


PAIR = cases.PairCase("", 700, 200, norm=True, narrow=40)


def draw_pair(case):
    x, wide, norm, _ = draw(case)
    narrow = dataclasses.replace(case, n=case.narrow, bits=case.narrow_bits, group=case.narrow_group)
    return x, wide, draw(narrow, seed=1)[1], norm


@pytest.mark.bits
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bits,group", [(4, 64), (8, 32)])
def test_a_pair_has_the_bits_of_two_launches(rows, norm, bits, group):
    case = dataclasses.replace(PAIR, rows=rows, norm=norm, bits=bits, group=group)
    x, *weights, norm = draw_pair(case)
    got = case.call(x, *weights, norm, interpret=True)
    for y, weight in zip(got, weights, strict=True):
        assert relative(y, oracle(x, weight, norm)) <= 4e-3
        alone = kernel.decode(x, weight, norm, interpret=True)
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(alone, np.float32))


def test_public_function_of_a_pair():
    x, *weights, norm = draw_pair(dataclasses.replace(PAIR, rows=3))
    got = matmul.quantised_linear_pair(x, *weights, norm=norm)
    for y, weight in zip(got, weights, strict=True):
        assert relative(y, oracle(x, weight, norm)) < 4e-3
    with pytest.raises(ValueError, match="quantised_linear_pair: 17 rows, at most 16"):
        matmul.quantised_linear_pair(jnp.zeros((17, 700), BF16), *weights)
    with pytest.raises(ValueError, match=r"x bfloat16 \(3, 700\) must be bfloat16 or float32 \[rows, 128\]"):
        matmul.quantised_linear_pair(x, weights[0], draw(cases.Case("", 128, 40))[1])
    with pytest.raises(ValueError, match="impl: 'triton' is not one of auto, pallas, xla, cpu"):
        matmul.quantised_linear_pair(x, *weights, impl="triton")


@pytest.mark.parametrize("rows", [2, 20])
def test_public_function_on_a_cpu(rows):
    case = cases.Case("", 128, 256, rows=rows, norm=True, swiglu=True, residual=True)
    x, weight, norm, residual = draw(case)
    got = matmul.quantised_linear(x, weight, norm=norm, residual=residual, swiglu=True)
    assert relative(got, oracle(x, weight, norm, residual, swiglu=True)) < 4e-3


def test_bad_input_is_named():
    x, weight, norm, residual = draw(cases.Case("", 128, 128, norm=True, residual=True))
    for given, message in (
        (dict(x=x.astype(jnp.float16)), r"x float16 \(16, 128\) must be bfloat16 or float32 \[rows, 128\]"),
        (dict(x=x.astype(jnp.float32), impl="pallas"), r"x float32 \(16, 128\) must be bfloat16 \[rows, 128\] on a GPU"),
        (dict(norm=norm[:64]), r"norm bfloat16 \(64,\) must be bfloat16 \[128\]"),
        (dict(residual=residual[:3]), r"residual bfloat16 \(3, 128\) must be bfloat16 \(16, 128\)"),
        (dict(activations="fp8"), "activations 'fp8' is not one of bf16, int8"),
        (dict(activations="int8"), "int8 is for more than 16 rows, x has 16"),
        (dict(impl="cuda"), "impl: 'cuda' is not one of auto, pallas, xla"),
    ):
        with pytest.raises(ValueError, match=message):
            matmul.quantised_linear(**(dict(x=x, weight=weight) | given))
    with pytest.raises(ValueError, match="swiglu needs N a multiple of 256 on a GPU, not 70"):
        matmul.quantised_linear(x, draw(cases.Case("", 128, 70))[1], swiglu=True, impl="pallas")
    with pytest.raises(ValueError, match="swiglu needs gate and up of one width, N is 71"):
        matmul.quantised_linear(x, draw(cases.Case("", 128, 71))[1], swiglu=True)
    with pytest.raises(ValueError, match=r"bits: 3 is not one of \(4, 8\)"):
        matmul.quantise(jnp.zeros((64, 64)), bits=3)
    with pytest.raises(ValueError, match=r"group: 48 is not one of \(32, 64, 128\)"):
        matmul.quantise(jnp.zeros((64, 64)), group=48)


@functools.cache
def compiled(case, target="rtx4090"):
    return rows.measure(case, target)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_compiled_for_a_4090(case):
    """Registers, shared memory, tensor cores and the instruction budget, from the machine code for sm_89."""
    row = compiled(case)
    assert row.spill_bytes == 0
    assert row.smem_bytes <= 99 * 1024
    assert row.tensor_core_instructions > 0
    # Unpacking: no byte or 16-bit loads from shared memory, words by 128 bits, no conversion from integer.
    assert not any(op.startswith(("LDS.U", "LDS.S", "LDL", "STL")) for op in row.loads)
    assert any(op.startswith("LDS.128") for op in row.loads)
    assert row.conversions == 0
    if case in cases.PAIR:
        assert row.blocks_per_sm >= 2  # one of each projection, or the narrow one's blocks would come after the others
    if case.decode:
        assert row.launches == 1
        assert row.bytes_moved <= 1.05 * row.ideal_bytes
        assert row.thread_instructions_per_byte <= 25
        assert row.limit == "memory"


@pytest.mark.full
@pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
@pytest.mark.parametrize("name", ["mlp.gate_up", "delta.inputs", "top_k", "mlp.down.prefill", "mlp.down.prefill_int8"])
def test_compiles_for_other_cards(name, target):
    (case,) = (c for c in cases.CASES if c.name == name)
    row = compiled(case, target)
    assert row.tensor_core_instructions > 0
    assert row.smem_bytes <= targets.get(target).smem_per_block
