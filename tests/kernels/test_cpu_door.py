"""Kernels written as LLVM code: the words they are written with, the way into XLA, and what is kept between runs."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu import kept, machine, xla_ffi

N = 48
ROOT = Path(__file__).parents[2]


def run(name, build, arguments, results, **options):
    return jax.jit(cpu.kernel(name, build, arguments, results, **options))(*arguments)


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_parts_before_and_after_each_run_once_and_in_order():
    """Every part adds its own number to what `before` wrote; `after` sums the workspace."""
    parts = 64

    def before(c, x, total, work):
        c.loop(0, parts, [], lambda i: work.store(x.load(i), i))

    def part(c, x, total, work):
        work.store(work.load(c.part) + c.part.to(xla_ffi.I32), c.part)

    def after(c, x, total, work):
        [s] = c.loop(0, parts, [c.constant(0, xla_ffi.I32)], lambda i, s: [s + work.load(i)])
        total.store(s, 0)

    x = jnp.arange(parts, dtype=jnp.int32) * 1000
    call = cpu.kernel(
        "count_parts",
        part,
        [x],
        [like(1, dtype=jnp.int32)],
        parts=parts,
        before=before,
        after=after,
        workspace=[like(parts, dtype=jnp.int32)],
    )

    @jax.jit
    def many(x):
        return jax.lax.fori_loop(0, 2000, lambda i, t: (t + call(x + t % 7)[0]) % 10007, jnp.zeros(1, jnp.int32))

    want = 0
    for _ in range(2000):
        want = (want + int(np.sum(np.arange(parts) * 1001 + want % 7))) % 10007
    assert int(many(x)[0]) == want


def test_a_state_is_updated_in_its_own_memory():
    def add(c, state, step, out):
        c.loop(0, N, [], lambda i: out.store(state.load(i, lanes=16) + step.load(0), i), step=16)

    state = jnp.arange(N, dtype=jnp.float32)
    call = cpu.kernel("in_place", add, [state, like(1)], [like(N)], aliases={0: 0})
    stepped = jax.jit(lambda s, d: call(s, d)[0], donate_argnums=0)
    want, pointer = np.asarray(state) + 2, state.unsafe_buffer_pointer()
    new = stepped(state, jnp.full(1, 2.0))
    assert np.array_equal(new, want)
    assert new.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize(
    "name, exact, least, most",
    [
        ("exp", np.exp, -87.0, 88.5),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), -86.0, 40.0),
        ("silu", lambda x: x / (1 + np.exp(-x)), -80.0, 40.0),
        ("softplus", lambda x: np.logaddexp(x, 0), -86.0, 40.0),
        ("log", np.log, 1e-30, 1e30),
        ("rsqrt", lambda x: 1 / np.sqrt(x), 1e-30, 1e30),
    ],
)
def test_functions_are_those_of_float64_to_a_few_last_bits(name, exact, least, most):
    spread = np.geomspace(least, most, 4800) if least > 0 else np.linspace(least, most, 4800)
    x = jnp.asarray(spread, jnp.float32)

    def body(c, a, out):
        c.loop(0, x.size, [], lambda i: out.store(getattr(c, name)(a.load(i, lanes=16)), i), step=16)

    (y,) = run("function_" + name, body, [x], [x])
    want = exact(np.asarray(x, np.float64))
    error = np.abs(np.asarray(y, np.float64) - want) / np.abs(want)
    assert error.max() < 3e-7


def test_bfloat16_is_read_exactly_and_rounded_as_numpy_rounds():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(4800) * np.geomspace(1e-30, 1e30, 4800), jnp.float32)
    x = x.at[0].set(jnp.nan).at[1].set(jnp.inf).at[2].set(1 + 2**-8).at[3].set(1 + 3 * 2**-8)

    def body(c, a, out, back):
        def step(i):
            out.store(a.load(i, lanes=16), i)
            back.store(out.load(i, lanes=16), i)

        c.loop(0, x.size, [], step, step=16)

    rounded, back = run("bf16", body, [x], [like(4800, dtype=jnp.bfloat16), x])
    want = np.asarray(x).astype(jnp.bfloat16)
    assert np.array_equal(np.asarray(rounded).view(np.uint16)[1:], want.view(np.uint16)[1:])
    assert np.isnan(np.asarray(rounded, np.float32)[0])
    assert np.array_equal(np.asarray(back)[1:], want.astype(np.float32)[1:])


def test_a_loop_may_make_no_pass_and_a_horizontal_sum_is_by_halves():
    x = jnp.asarray(np.random.default_rng(1).standard_normal(16), jnp.float32)

    def body(c, a, stop, out):
        (v,) = c.loop(0, stop.integer(0), [a.load(0, lanes=16)], lambda i, v: [v * 2.0])
        out.store(v.sum(), 0)

    call = cpu.kernel("no_pass", body, [x, like(1, dtype=jnp.int32)], [like(1)])
    v = np.asarray(x)
    while v.size > 1:
        v = v[: v.size // 2] + v[v.size // 2 :]
    for passes in (0, 3):
        (got,) = jax.jit(call)(x, jnp.full(1, passes, jnp.int32))
        assert float(got[0]) == float(v[0]) * 2**passes


def test_the_same_bits_under_avx2_alone():
    """A sum and an exponential, natively and in a process that is told of no AVX-512."""
    source = """
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels import cpu
x = jnp.asarray(np.random.default_rng(2).standard_normal(4096), jnp.float32)
def body(c, a, out):
    def step(i, s):
        v = c.exp(a.load(i, lanes=16))
        return [c.fma(v, v, s)]
    [s] = c.loop(0, 4096, c.zeros(1), step, step=16)
    out.store(s.sum(), 0)
call = cpu.kernel("isa", body, [x], [jax.ShapeDtypeStruct((1,), jnp.float32)])
print(call.target, np.asarray(jax.jit(call)(x)[0]).tobytes().hex(), cpu.here().has("avx512f"))
"""
    said = []
    for flags in ("", "--xla_cpu_max_isa=AVX2"):
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
        said.append(
            subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True).stdout.split()
        )
    assert said[0][1] == said[1][1]
    assert said[1][2] == "False"
    assert (said[0][0] == said[1][0]) == (said[0][2] == "False")


@pytest.fixture
def kept_at(tmp_path, monkeypatch):
    """The folder of kept code, an empty one; `compiled()`: how often LLVM has been asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    whole = machine._compile
    monkeypatch.setattr(machine, "_compile", lambda *a: asked.append(1) or whole(*a))
    place = tmp_path / "ninfer_jax" / "cpu"
    yield SimpleNamespace(place=place, compiled=lambda: len(asked))


NINE = "define i64 @nine() { ret i64 9 }"


def test_kept_code_is_used_again_and_damaged_code_is_not(kept_at, caplog):
    assert machine.object_code(NINE) == machine.object_code(NINE)
    assert kept_at.compiled() == 1
    [file] = kept_at.place.iterdir()
    assert file.stat().st_mode & 0o077 == 0 and file.parent.stat().st_mode & 0o077 == 0
    for damage in (lambda data: data[:40] + b"?" + data[41:], lambda data: data[:20], lambda data: b""):
        before = kept_at.compiled()
        file.write_bytes(damage(file.read_bytes()))
        assert machine.load("nine", machine.object_code(NINE))
        assert kept_at.compiled() == before + 1
        assert caplog.messages.pop() == f"a kept CPU kernel is compiled again: {file} is damaged"


def test_code_that_others_can_write_is_neither_run_nor_kept(kept_at, caplog):
    machine.object_code(NINE)
    [file] = kept_at.place.iterdir()
    file.chmod(0o666)
    machine.object_code(NINE)
    assert kept_at.compiled() == 2 and "can be written by others" in caplog.messages.pop()
    [file] = kept_at.place.iterdir()
    assert file.stat().st_mode & 0o077 == 0  # compiled again, and written as one's own
    target = file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(target)
    machine.object_code(NINE)
    assert kept_at.compiled() == 3 and str(file) in caplog.messages.pop()
    for folder in (kept_at.place, kept_at.place.parent):
        folder.chmod(0o770)
        machine.object_code(NINE)
        assert caplog.messages.pop() == f"compiled CPU kernels are not kept: {folder} can be written by others: chmod go-w"
        folder.chmod(0o700)
    assert kept_at.compiled() == 5


def test_the_least_recently_used_go_when_there_is_too_much(kept_at, monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 4000)
    for at, key in enumerate("abc"):
        kept.write(key, bytes(1000))
        os.utime(kept_at.place / f"{key}.o", (at, at))
    assert kept.read("a") == bytes(1000)
    kept.write("d", bytes(1000))
    assert sorted(file.stem for file in kept_at.place.iterdir()) == ["a", "d"]


KEEPING = """
import sys
from pallas_kernels.cpu import machine
for n in range(40):
    machine.object_code(f"define i64 @f{n}() {{ ret i64 {n} }}")
"""


def test_processes_share_what_they_keep(kept_at):
    """Two that write the same entries at once; each entry ends up whole."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    both = [subprocess.Popen([sys.executable, "-c", KEEPING], env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(p.communicate()[1], p.returncode) for p in both] == [("", 0)] * 2
    assert {file.suffix for file in kept_at.place.iterdir()} == {".o"} and len(list(kept_at.place.iterdir())) == 40
    machine.object_code("define i64 @f7() { ret i64 7 }")
    assert kept_at.compiled() == 0


def test_a_kernel_for_shapes_that_were_there_before_is_not_written_again(monkeypatch):
    """But one whose function knows something else is."""
    written = []
    whole = cpu._source
    monkeypatch.setattr(cpu, "_source", lambda *a: written.append(1) or whole(*a))
    x = like(16)
    first, again, other = (cpu.kernel("filled", functools.partial(fill, number=n), [x], [x]) for n in (1, 1, 2))
    assert first is again and len(written) == 2
    closures = [lambda c, x, out, n=n: fill(c, x, out, n) for n in (3, 4)]
    assert [float(cpu.kernel("filled", f, [x], [x])(jnp.zeros(16))[0][0]) for f in closures] == [3, 4]
    assert [float(k(jnp.zeros(16))[0][0]) for k in (first, other)] == [1, 2]


def fill(c, x, out, number):
    out.store(c.constant(number, lanes=16), 0)


def test_what_a_machine_lacks_is_one_line_that_names_xla(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    with pytest.raises(RuntimeError, match=r"^CPU kernels need .*without avx2, fma.*choose kernels='xla'$"):
        machine.here.__wrapped__()
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(RuntimeError, match=r"^CPU kernels need llvmlite .*choose kernels='xla'$"):
        machine.here.__wrapped__()


def test_the_installed_header_is_known_and_another_version_is_refused():
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    layout = xla_ffi.read_layout(header)
    known = {
        "CallFrame.extension_start": 8,
        "CallFrame.api": 16,
        "Args.args": 32,
        "Buffer.data": 24,
        "CallFrame.stage": 32,
        "CallFrame.args": 40,
    }
    assert {k: layout.at(k) for k in known} == known
    assert (layout.at("CallFrame.args") + layout.at("Args.args"), layout.at("CallFrame.rets") + layout.at("Rets.rets")) == (72, 112)
    with pytest.raises(RuntimeError, match=r"^XLA FFI 0\.9: CPU kernels know .*choose kernels='xla'"):
        xla_ffi.read_layout(header.replace("XLA_FFI_API_MINOR ", "XLA_FFI_API_MINOR 9 //"))
    with pytest.raises(RuntimeError, match=r"no field CallFrame\.future"):
        xla_ffi.read_layout(
            header.replace("* future;  // out\n};\n\nXLA_FFI_DEFINE_STRUCT_TRAITS(XLA_FFI_CallFrame", "* x;\n};\n(")
        ).at("CallFrame.future")


def test_the_same_code_serves_arrays_that_differ_where_it_does_not_look():
    def first_row(c, x, out):
        c.loop(0, N, [], lambda i: out.store(x.load(0, i, lanes=16), i), step=16)

    for rows in (3, 5):
        x = jnp.arange(rows * N, dtype=jnp.float32).reshape(rows, N)
        call = cpu.kernel("first_row", first_row, [x], [like(N)])
        assert np.array_equal(jax.jit(call)(x)[0], x[0])


SCATTERED = """
import ctypes, jax.numpy as jnp
from pallas_kernels.matmul import linear

page, reach = 4096, 4 << 30
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
reserve = lambda size: libc.mmap(None, size, 0, 0x4022, -1, 0)  # private, anonymous, no access, not counted as memory
assert float(linear(jnp.ones((1, 64)), jnp.ones((64, 64)), impl="cpu")[0, 0]) == 64
base = reserve(16 * reach)
for pages in 256, 16, 1:
    while reserve(pages * page) > base:  # every gap above
        pass
for hole in range(1, 16):
    libc.munmap(base + hole * reach, page)
for k in range(80, 208, 16):
    assert float(linear(jnp.ones((1, k)), jnp.ones((64, k)), impl="cpu")[0, 0]) == k
"""


def test_code_may_lie_far_from_its_constants(tmp_path):
    """In an address space whose only gaps are of a page and 4 GiB apart; nothing comes from the cache."""
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCATTERED], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
