"""The decode projection through Triton itself: numbers in Triton's interpreter, compiled facts, what is said without it.

The kernel's tests need the extra `triton`, hence the newer lane; the others run everywhere.
"""

import dataclasses
import functools
import importlib.util
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_quantised_matmul import draw, oracle, poison, relative

from pallas_kernels import inspect, matmul, targets
from pallas_kernels.lab import registry, rows
from pallas_kernels.lab.__main__ import main
from pallas_kernels.matmul import cases, triton_cases, triton_kernel

OP = "quantised_matmul_triton"
CASE = cases.Case("", 128, 128)
# Small twins that differ in more than the name.
SMALL = {dataclasses.replace(c, name=""): c for c in triton_cases.SMALL}.values()


def test_a_missing_extra_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    x, weight, _, _ = draw(CASE)
    with pytest.raises(RuntimeError, match=r"^impl 'triton' needs jax-triton .*pip install 'ninfer-jax\[triton\]'$"):
        matmul.quantised_linear(x, weight, impl="triton")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else find(name))
    assert OP not in {c.op for c in registry.cases()}
    assert main(["report", OP]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: OP: {OP} needs jax_triton") and "ninfer-jax[triton]" in error and error.count("\n") == 1


def test_prefill_rows_are_refused():
    x, weight, _, _ = draw(dataclasses.replace(CASE, rows=17))
    with pytest.raises(ValueError, match="impl: 'triton' is for up to 16 rows, x has 17"):
        matmul.quantised_linear(x, weight, impl="triton")


def test_launches_are_read_from_a_program():
    """A made-up program: a kernel with a grid and one without, launched twice."""

    def field(number, value):
        if isinstance(value, int):
            return bytes([number << 3]) + (bytes([value & 127 | 128, value >> 7]) if value > 127 else bytes([value]))
        return bytes([number << 3 | 2]) + field(0, len(value))[1:] + value

    def line(ptx, name, *grid):
        call = field(1, field(2, 4) + field(3, 1000) + field(4, ptx)) + b"".join(field(i + 2, n) for i, n in enumerate(grid))
        data = zlib.compress(field(1, call) + field(4, name))
        text = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else "\\\\" if b == 92 else f"\\{b:02X}" for b in data)
        return f'%c = custom-call(%a), custom_call_target="triton_kernel_call_ffi", backend_config={{opaque = "{text}"}}\n'

    first, second = inspect.TritonCall("w", "one", 600, 128, 1000), inspect.TritonCall("w_1", "two", 1, 128, 1000)
    program = line(b"one", b"w", 300, 2) + line(b"two", b"w") + line(b"one", b"w", 300, 2)
    assert inspect.triton_calls(program) == [first, second, first]
    assert inspect.triton_calls("ROOT %add = f32[4] add(%a, %b)") == []


@functools.cache
def compiled(case, target="rtx4090"):
    return rows.measure(case, target)


class TestKernel:
    __test__ = importlib.util.find_spec("jax_triton") is not None

    @pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
    def test_against_float64(self, case):
        arguments = draw(case)
        got = case.call(*arguments, interpret=True)
        want = oracle(*arguments, swiglu=case.swiglu)
        assert got.shape == want.shape and got.dtype == jnp.bfloat16
        assert relative(got, want) <= 4e-3

    @pytest.mark.parametrize("bits,group", [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128)])
    def test_sums_are_exact_products(self, bits, group):
        """Without a norm nothing but the sum itself is rounded: codes reach the tensor cores exactly."""
        x, weight, _, _ = draw(cases.Case("", 512, 128, bits=bits, group=group))
        got = triton_kernel.decode(x, weight, out_dtype=jnp.float32, interpret=True)
        assert relative(got, oracle(x, weight)) < 1e-6

    @pytest.mark.bits
    def test_a_row_has_the_same_bits_in_any_company(self):
        x, weight, norm, residual = draw(cases.Case("", 300, 128, norm=True, residual=True))
        together = triton_kernel.decode(x, weight, norm, residual, interpret=True)
        for count in (1, 3, 8):
            alone = triton_kernel.decode(x[:count], weight, norm, residual[:count], interpret=True)
            np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(together[:count], np.float32))

    @pytest.mark.bits
    def test_padding_is_never_read_into_a_result(self):
        """Codes in padded rows of K and units of padded columns are poisoned."""
        x, weight, _, _ = draw(cases.Case("", 200, 100, rows=3))
        poisoned = poison(weight)
        got, want = (triton_kernel.decode(x, w, interpret=True) for w in (poisoned, weight))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))

    @pytest.mark.parametrize("case", triton_cases.CASES, ids=lambda c: c.name)
    def test_compiled_for_a_4090(self, case):
        row = compiled(case)
        assert row.launches == 1
        assert row.spill_bytes == 0
        assert row.smem_bytes <= 99 * 1024
        assert row.tensor_core_instructions > 0
        assert row.conversions == 0
        assert any(op.startswith("LDS.128") for op in row.loads)
        assert not any(op.startswith(("LDS.U", "LDS.S", "LDL", "STL")) for op in row.loads)
        assert row.bytes_moved <= 1.05 * row.ideal_bytes
        assert row.thread_instructions_per_byte <= 25
        assert row.limit == "memory"

    @pytest.mark.full
    @pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
    def test_compiles_for_other_cards(self, target):
        (case,) = (c for c in triton_cases.CASES if c.name == "mlp.gate_up")
        row = compiled(case, target)
        assert row.tensor_core_instructions > 0
        assert row.smem_bytes <= targets.get(target).smem_per_block

    def test_the_public_function_launches_it_and_only_when_told(self):
        case = cases.Case("", 512, 256, rows=5, norm=True, swiglu=True, residual=True)

        def call(impl):
            def fn(x, weight, norm, residual):
                return matmul.quantised_linear(x, weight, norm=norm, residual=residual, swiglu=True, impl=impl)

            return inspect.report(fn, case.arguments())

        assert list(call("triton").kernels) == ["w4_triton_norm_swiglu_add"]
        assert not any("triton" in name for name in call("auto").kernels)

    def test_the_lab_knows_it(self, capsys):
        assert main(["check", f"{OP}/attention.out"]) == 0
        assert capsys.readouterr().out.startswith(f"ok   {OP}/attention.out.small")
        assert jax.default_backend() == "cpu"
