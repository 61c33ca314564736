"""The PTX of packed operations, run by a small interpreter written from the PTX manual, against their jnp twins.

The kernels' interpreter runs the twins only, so this is what ties the two together without a card.
"""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import launch
from pallas_kernels.matmul import unpack


def run_ptx(asm, *inputs):
    """Executes `asm` on uint32 arrays `$1`, `$2`, ... and returns `$0`."""
    registers = {f"${i + 1}": a.astype(np.uint32) for i, a in enumerate(inputs)}
    body = re.sub(r"\.reg[^;]*;", "", asm.strip().removeprefix("{").removesuffix("}"))
    for line in filter(None, (s.strip() for s in body.split(";"))):
        op, rest = line.split(None, 1)
        out, *names = [n.strip() for n in rest.split(",")]
        values = [registers[n] if n in registers else np.uint32(int(n, 0)) for n in names]
        registers[out] = INSTRUCTIONS[op](*values).astype(np.uint32)
    return registers["$0"]


def lop3(a, b, c, table):
    """Bit i of the table is the result where (a, b, c) read as the number i."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            terms = [v if i & bit else ~v for v, bit in ((a, 4), (b, 2), (c, 1))]
            result = result | (terms[0] & terms[1] & terms[2])
    return result


def prmt(a, b, selector):
    """Result byte i is byte (selector nibble i) of the eight bytes of b:a."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    picks = [both >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(255) for i in range(4)]
    return sum(p << np.uint64(8 * i) for i, p in enumerate(picks))


def halves(v):
    return [
        ((v >> np.uint32(s)) & np.uint32(0xFFFF)).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64) for s in (0, 16)
    ]


def fma_bf16x2(a, b, c):
    parts = [(x * y + z).astype(ml_dtypes.bfloat16).view(np.uint16) for x, y, z in zip(*map(halves, (a, b, c)), strict=True)]
    return parts[0].astype(np.uint32) | parts[1].astype(np.uint32) << 16


INSTRUCTIONS = {
    "mov.b32": lambda a: a + np.uint32(0),
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma_bf16x2,
}


@pytest.fixture
def captured(monkeypatch):
    """Calls of `launch.packed` answer with their twin and leave (asm, arguments, result, pack) here."""
    calls = []

    def packed(asm, twin, *args, dtype, interpret, pack=2):
        calls.append((asm, [np.asarray(a) for a in args], np.asarray(twin(*args)), pack))
        return twin(*args)

    monkeypatch.setattr(launch, "packed", packed)
    return calls


def registers(array, pack):
    """Elements in groups of `pack`, as the 32-bit registers an instance of the asm gets: `[registers, groups]`."""
    return list(array.reshape(-1, pack).view(np.uint32).T)


def check(calls):
    ((asm, arguments, twin, pack),) = calls
    inputs = [r for a in arguments for r in registers(a, pack)]
    return run_ptx(asm, *inputs), registers(twin, pack)[0]


# Every 16-bit word, in an order that pairs each with others.
WORDS = np.random.default_rng(0).permutation(np.arange(-(2**15), 2**15)).astype(np.int16).reshape(8, 8192)


@pytest.mark.parametrize("bits,j", [(4, 0), (4, 1), (4, 2), (4, 3), (8, 0), (8, 1)])
@pytest.mark.parametrize("form", [unpack.plane, unpack.plane_s8])
def test_unpacking(captured, form, bits, j):
    form(jnp.asarray(WORDS), bits, j, WORDS.shape[1] // 32, False)
    got, want = check(captured)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", [unpack.times, unpack.times_one_plus])
def test_products(captured, form):
    rng = np.random.default_rng(1)
    form(*(jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16) for _ in range(2)), False)
    got, want = check(captured)
    # The twin rounds 1 + w to float32 on the way: the last bit may differ once in a great while.
    assert np.mean(got != want) < 0.005
    for a, b in zip(halves(got), halves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7)
