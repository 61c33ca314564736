"""Projections by CPU kernels: against float64 for every storage and every part around a product, and bits."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import cpu_prefill, head_candidates, linear, quantised, quantised_linear, quantised_linear_pair

EPS = 1e-6
K, N = 154, 108  # neither is a multiple of 8


def inputs(k, n, rows, dtype=jnp.float32, norm=False, swiglu=False, residual=False):
    rng = np.random.default_rng(k + n)
    x = jnp.asarray(rng.standard_normal((24, k)) * np.exp(rng.standard_normal((24, 1))), dtype)[:rows]
    options = {}
    if norm:
        options["norm"] = jnp.asarray(0.3 * rng.standard_normal(k), jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)
    if residual:
        options["residual"] = jnp.asarray(rng.standard_normal((24, n // 2 if swiglu else n)), dtype)[:rows]
    return x, jnp.asarray(rng.standard_normal((n, k)) / k**0.5, jnp.float32), options | {"swiglu": swiglu}


def exact(x, w, norm=None, residual=None, swiglu=False):
    """The formulas in float64, w `[out, in]`, and the sum of magnitudes behind each product."""
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * (1 + np.asarray(norm, np.float64))
    y, size = x @ w.T, np.abs(x) @ np.abs(w).T
    if swiglu:
        (gate, up), (a, b) = np.split(y, 2, axis=1), np.split(size, 2, axis=1)
        sigmoid = 1 / (1 + np.exp(-gate))
        # |silu'| <= 1.1
        y, size = gate * sigmoid * up, 1.1 * a * np.abs(up) + np.abs(gate * sigmoid) * b + a * b
    return y if residual is None else y + np.asarray(residual, np.float64), size


@functools.cache
def stored(k, n, bits, group):
    return quantised.quantise(inputs(k, n, 1)[1].T, bits=bits, group=group)


PARTS = [{}, {"norm": True}, {"residual": True}, {"norm": True, "swiglu": True}, {"swiglu": True, "residual": True}]


@pytest.mark.parametrize("parts", PARTS, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_product_of_stored_weights_is_that_of_float64(stored, parts):
    x, w, options = inputs(K, N, 5, **parts)
    w = w.astype(stored)
    y = jax.jit(functools.partial(linear, impl="cpu", swiglu=options.pop("swiglu")))(x, w, **options)
    want, size = exact(x, w, swiglu=parts.get("swiglu", False), **options)
    # K roundings of a sum, a few of the norm's; none is above 2^-24 of the magnitudes.
    assert (np.abs(y - want) <= (K + 16) * 2**-24 * size + 2**-23 * np.abs(want)).all()


def test_bfloat16_activations_are_rounded_once_after_the_norm_and_once_at_the_end():
    x, w, options = inputs(K, N, 4, jnp.bfloat16, norm=True)
    y = jax.jit(functools.partial(linear, impl="cpu"))(x, w.astype(jnp.bfloat16), norm=options["norm"].astype(jnp.float32))
    want, size = exact(x, w.astype(jnp.bfloat16), norm=options["norm"])
    assert y.dtype == jnp.bfloat16
    assert (np.abs(np.asarray(y, np.float64) - want) <= 2**-8 * np.abs(want) + 2**-8.5 * size).all()


@pytest.mark.parametrize("parts", PARTS, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize("bits, group", [(4, 32), (4, 128), (8, 64)])
def test_a_product_of_codes_is_that_of_float64_and_16_bit_activations(bits, group, parts):
    k, n = 300, 256 if "swiglu" in parts else 200
    x, _, options = inputs(k, n, 5, jnp.bfloat16, **parts)
    weight = stored(k, n, bits, group)
    swiglu = options.pop("swiglu")
    y = jax.jit(functools.partial(quantised_linear, impl="cpu", swiglu=swiglu, out_dtype=jnp.float32))(x, weight, **options)
    full = np.asarray(quantised.dequantise(weight), np.float64).T
    want, size = exact(x, full, swiglu=swiglu, **options)
    # Half a step of a group's peak / 32767 an activation, times the weights of the group.
    h = np.asarray(x, np.float64)
    if "norm" in options:
        h = h / np.sqrt(np.mean(h * h, axis=1, keepdims=True) + EPS) * (1 + np.asarray(options["norm"], np.float64))
    padded = np.pad(h, ((0, 0), (0, -k % group))).reshape(len(h), -1, group)
    step = np.repeat(np.abs(padded).max(2) / 32767, group, axis=1)[:, :k]
    lost = 0.5 * step @ np.abs(full).T
    if swiglu:
        lost = lost.max(axis=1, keepdims=True) * (1.1 * np.abs(want).max() + 8)
    assert (np.abs(y - want) <= lost + 2**-20 * size + 2**-23 * np.abs(want)).all()


@pytest.mark.parametrize("parts", PARTS, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize("bits, group, whole", [(4, 64, True), (4, 32, False), (8, 128, False)])
def test_many_rows_are_multiplied_by_the_numbers_that_codes_stand_for(bits, group, whole, parts, monkeypatch):
    k, n, rows = 300, 256 if "swiglu" in parts else 200, 40
    rng = np.random.default_rng(k)
    x, _, options = inputs(k, n, 24, **parts)
    x = jnp.concatenate([x, x])[:rows]
    if "norm" in options:
        options["norm"] = options["norm"].astype(jnp.bfloat16)
    swiglu = options.pop("swiglu")
    if "residual" in options:
        options["residual"] = jnp.asarray(rng.standard_normal((rows, n // 2 if swiglu else n)), jnp.float32)
    weight = stored(k, n, bits, group)
    monkeypatch.setattr(cpu_prefill, "BLOCK_BYTES", 4 * weight.tiles * weight.tile * (1000 if whole else 64))
    out = n // 2 if swiglu else n
    assert (cpu_prefill.block_columns(weight, out) == out) == whole
    y = jax.jit(functools.partial(quantised_linear, impl="cpu", swiglu=swiglu, out_dtype=jnp.float32))(x, weight, **options)
    want, size = exact(x, np.asarray(quantised.dequantise(weight), np.float64).T, swiglu=swiglu, **options)
    # As for float32 weights, and two roundings of each number.
    assert (np.abs(y - want) <= (k + 16) * 2**-24 * size + 2**-23 * np.abs(want)).all()


def test_many_rows_never_expand_a_whole_weight():
    k, n = 4096, 16_384  # 256 MB in float32
    weight = quantised.structure(k, n, 4, 64)
    run = functools.partial(quantised_linear, impl="cpu", swiglu=True, out_dtype=jnp.float32)
    x = jax.ShapeDtypeStruct((64, k), jnp.float32)
    needed = jax.jit(run).lower(x, weight).compile().memory_analysis().temp_size_in_bytes
    assert needed < 2 * cpu_prefill.BLOCK_BYTES + 4 * 64 * (3 * k + 2 * n)


def test_float32_activations_give_float32():
    x, _, options = inputs(300, 200, 5, residual=True)
    weight = stored(300, 200, 4, 32)
    want, size = exact(x, np.asarray(quantised.dequantise(weight), np.float64).T, residual=options["residual"])
    for impl, lost in (("cpu", 2**-15), ("xla", 2**-20)):
        y = jax.jit(functools.partial(quantised_linear, impl=impl, out_dtype=jnp.float32))(x, weight, residual=options["residual"])
        assert (np.abs(y - want) <= lost * size + 2**-22 * np.abs(want)).all()
    for impl in ("pallas", "triton"):
        with pytest.raises(ValueError, match=r"x float32 \(5, 300\) must be bfloat16 \[rows, 300\] on a GPU"):
            quantised_linear(x, weight, impl=impl)


def test_a_pair_is_two_products_and_candidates_are_the_largest_logits():
    x, w, _ = inputs(256, 200, 3, jnp.bfloat16)
    wide, narrow = quantised.quantise(w.T, bits=4, group=64), quantised.quantise(w[:40].T, bits=8, group=128)
    one = functools.partial(quantised_linear, impl="cpu")
    both = jax.jit(functools.partial(quantised_linear_pair, impl="cpu"))(x, wide, narrow)
    assert all(np.array_equal(a, jax.jit(one)(x, b)) for a, b in zip(both, (wide, narrow), strict=True))
    logits = np.asarray(jax.jit(functools.partial(one, out_dtype=jnp.float32))(x, wide))[:, :190]
    for k in (1, 5):
        values, ids = jax.jit(functools.partial(head_candidates, k=k, valid=190, impl="cpu"))(x, wide)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        assert np.array_equal(ids, order) and np.array_equal(values, np.take_along_axis(logits, order, 1))


def digests():
    """Bits of row 0 for every number of rows and storage, in hex; run here and in a process that is told of no AVX-512."""
    found = []
    for stored in ("float32", "bfloat16", 4, 8):
        x, w, options = inputs(320, 512, 24, jnp.float32 if isinstance(stored, str) else jnp.bfloat16, norm=True, swiglu=True)
        weight = w.astype(stored) if isinstance(stored, str) else quantised.quantise(w.T, bits=stored, group=64)
        run = functools.partial(linear if isinstance(stored, str) else quantised_linear, impl="cpu", **options)
        whole = np.asarray(jax.jit(run)(x, weight), np.float32)
        for rows in (1, 2, 3, 4, 6, 9):
            few = np.asarray(jax.jit(run)(x[24 - rows :], weight), np.float32)
            assert np.array_equal(few, whole[24 - rows :]), (stored, rows)
        found.append(whole.tobytes().hex())
    return found


def test_a_row_has_the_same_bits_beside_any_others():
    digests()


@pytest.mark.parametrize("flags", ["--xla_cpu_max_isa=AVX2", "--xla_cpu_multi_thread_eigen=false"])
@pytest.mark.long
def test_the_bits_are_those_of_avx2_and_of_one_thread(flags, tmp_path):
    # Quantised by one program: the search for scales is XLA's, whose bits differ.
    out = tmp_path / "weights.npz"
    given = {}
    for bits in (4, 8):
        weight = quantised.quantise(inputs(320, 512, 1)[1].T, bits=bits, group=64)
        given |= {f"{bits}{f}": np.asarray(getattr(weight, f)) for f in ("words", "scales", "unit")}
    np.savez(out, **given)
    source = f"""
import sys, numpy as np, jax.numpy as jnp
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_cpu_matmul as t
from pallas_kernels.matmul import quantised
stored = np.load({str(out)!r})
t.quantised.quantise = lambda w, bits, group: quantised.QuantisedWeight(
    *(jnp.asarray(stored[f"{{bits}}{{f}}"]) for f in ("words", "scales", "unit")), bits, group, w.shape)
print(*t.digests())
"""
    said = []
    for given_flags in ("", flags):
        env = os.environ | {"XLA_FLAGS": given_flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
        said.append(subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1] and len(said[0]) > 1000


def test_more_rows_than_a_decode_step_has_are_no_business_of_the_cpu_form():
    with pytest.raises(ValueError, match="impl: 'cpu' is not one of auto, xla"):
        linear(jnp.zeros((33, 8)), jnp.zeros((8, 8)), impl="cpu")
