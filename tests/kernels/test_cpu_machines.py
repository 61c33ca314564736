"""The attention and delta kernels have the same bits with AVX-512, with AVX2 alone, and with one thread."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = """
import hashlib, os, sys
if "alone" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
import test_cpu_attention, test_cpu_delta, test_cpu_kv_append
from pallas_kernels import cpu

def say(*arrays):
    print(hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest())

layer = test_cpu_delta.ODD
arguments = test_cpu_delta.draw(layer, 4)
arguments["count"][:] = 3, 8, 0
say(*test_cpu_delta.decode(arguments, 4).values(), *test_cpu_delta.fold(layer, arguments).values())
for format in ("int8", "rk4v4-e8"):
    heads = test_cpu_kv_append.ODD
    q, pool = test_cpu_kv_append.run(heads, test_cpu_kv_append.draw(heads, 40), format)
    say(q, pool.k.codes, pool.k.scales, pool.v.codes, pool.v.scales)
for format in ("f32", "rk4v4-e8"):
    cache = test_cpu_attention.Cache(test_cpu_attention.SMALL, format, [16 * 64 + 70, 63])
    say(cache.run(*cache.draw(4)))
print(cpu.here().has("avx512f"), len(os.sched_getaffinity(0)))
"""


def said(flags: str, *arguments: str) -> list[str]:
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE)))
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SOURCE, *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_bits_depend_on_neither_vectors_nor_threads():
    *native, _ = said("")
    *narrow, machine = said("--xla_cpu_max_isa=AVX2")
    assert machine.startswith("False")
    *alone, machine = said("", "alone")
    assert machine.endswith(" 1")
    assert len(set(native)) == 5
    assert narrow == native
    assert alone == native
