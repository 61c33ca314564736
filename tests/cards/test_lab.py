"""The lab's commands, on cases that are quick to compile."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import inspect, targets, tuned
from pallas_kernels.lab import bench, on_cpu, registry, rows, tune
from pallas_kernels.lab.__main__ import main
from pallas_kernels.matmul import cases, kernel, quantised

OUT = "quantised_matmul/attention.out"
FIELDS = {
    "op",
    "case",
    "target",
    "registers",
    "spill_bytes",
    "smem_bytes",
    "occupancy",
    "tensor_core_instructions",
    "bytes_moved",
    "ideal_bytes",
    "thread_instructions_per_byte",
    "modelled_us",
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Tuned sizes from an empty folder instead of the package's."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.entries.cache_clear()
    yield tmp_path
    tuned.entries.cache_clear()


def attention_out():
    return registry.cases([OUT])[0]


def entry(**config):
    return {"config": config, "by": "measured", "jax": jax.__version__, "date": "2026-01-01"}


@dataclasses.dataclass(frozen=True)
class Sum:
    """A case that any device runs: x + y, and a counter updated in place."""

    name: str = "sum"
    fails: str = ""
    op = "sum"
    donate = (2,)
    ideal_bytes = weight_bytes = 12 * 2**20
    multiply_adds = 0

    def arguments(self):
        large = jax.ShapeDtypeStruct((2**20,), jnp.float32)
        return [large, large, jax.ShapeDtypeStruct((), jnp.int32)]

    def sample(self, key):
        return [jnp.ones(s.shape, s.dtype) for s in self.arguments()]

    def call(self, x, y, counter):
        if self.fails:
            raise ValueError(self.fails)
        return x + y, counter + 1

    def tensor_ops(self):
        return 0


def test_list_names_every_case(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out.split()
    assert OUT in printed and "head/argmax" in printed
    assert len(printed) == len(set(printed)) == len(registry.cases(on_cpu=True))


def test_report_json_plot_and_compare(tmp_path, capsys):
    """By two processes, in the order asked for."""
    file, plot = tmp_path / "rows.json", tmp_path / "roofline.png"
    asked = ["report", OUT, "delta_fold/1x4", "--target", "rtx4090", "--jobs", "2"]
    assert main([*asked, "--json", str(file), "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["case", OUT, "delta_fold/1x4"] and not printed.err
    row, fold = json.loads(file.read_text())
    assert set(row) >= FIELDS and set(fold) >= FIELDS
    # 6144 x 5120 at 4 bits, a byte of scale per 64 and a unit a column: 15.7 + 0.5 MB; x, residual and output on top.
    weight = 6144 * 5120 // 2 + 6144 * 5120 // 64 + 4 * 5120
    assert row["bytes_moved"] == row["ideal_bytes"] == weight + 2 * 16 * (6144 + 2 * 5120)
    assert row["modelled_us"] == pytest.approx(row["bytes_moved"] / 1008e3) and row["limit"] == "memory"
    assert row["thread_instructions"] == pytest.approx(row["thread_instructions_per_byte"] * weight, abs=1)
    assert plot.read_bytes().startswith(b"\x89PNG")
    old = row | {"registers": row["registers"] + 1}
    changed = rows.compare([old, row | {"case": "gone"}], [rows.Row(**row)])
    assert changed.splitlines() == [
        f"{OUT}: registers {row['registers'] + 1} -> {row['registers']}",
        "quantised_matmul/gone: not in the new report",
    ]


def test_a_case_that_does_not_compile_does_not_end_the_report(monkeypatch, tmp_path, capsys):
    known = [Sum("bad", fails="no such kernel\nat all"), Sum("good")]
    monkeypatch.setattr(registry, "cases", lambda ops=None, small=False: known)
    file = tmp_path / "rows.json"
    assert main(["report", "--json", str(file)]) == 1
    assert capsys.readouterr().err == "failed: sum/bad: no such kernel\n"
    assert [r["case"] for r in json.loads(file.read_text())] == ["good"]


def test_check_interprets_small_twins_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "check.json"
    assert main(["check", OUT, "head/top_k", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [r["mode"] for r in results] == ["interpreted"] * 2 and all(r["passed"] for r in results)


def test_every_op_with_a_cpu_form_has_cases_for_it(capsys):
    """Of the ops that only a CPU has kernels for, the numbers hold."""
    folder = Path(registry.__file__).parents[1]
    forms = {file.parent.name for file in folder.glob("*/cpu.py")} - {"delta_rule", "kv_codecs"}  # words of others' kernels
    modules = [name for name in registry.MODULES if getattr(importlib.import_module(name), "ON_CPU", ())]
    assert {name.split(".")[1] for name in modules} == forms
    alone = [f"{c.op}/{c.name}" for c in registry.cpu_cases() if isinstance(c, on_cpu.CpuCase) and c.op != "linear"]
    assert main(["check", *alone, "linear/cpu.bfloat16.1row"]) == 0
    assert capsys.readouterr().out.count("ok ") == len(alone) + 1 == 5


def test_cpu_kernels_are_checked_and_timed_where_no_gpu_is(monkeypatch, tmp_path, capsys):
    """Beside the speed at which all cores read memory."""
    case, file = "kv_append/cpu.f32.1row", tmp_path / "rows.json"
    assert main(["check", case, "--json", str(file)]) == 0
    [result] = json.loads(file.read_text())
    assert result["mode"] == "compiled" and result["passed"]
    monkeypatch.setattr(bench, "RUNS", 3)
    assert main(["bench", case, "--json", str(file)]) == 0
    [row] = json.loads(file.read_text())
    assert row["device"] == "cpu" and row["median_us"] > 0 and row["copy_gb_s"] > 0
    assert row["bytes"] > 0 and row["gb_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
    printed = capsys.readouterr().out
    assert "a sum on all cores: " in printed and "of sum" in printed and case in printed.splitlines()[-1]


def test_tune_by_compiled_writes_what_the_projection_then_uses(monkeypatch, folder, capsys):
    """Narrow blocks win: wide ones leave SMs without work. The file holds for its card alone."""
    wide, narrow = kernel.Config(128, 8, 3), kernel.Config(32, 4, 3)
    monkeypatch.setattr(cases.Case, "configs", lambda self: [wide, narrow])
    other = {"quantised_matmul": {"k1_n1_w4g64": entry(columns=64, warps=4, stages=3)}}
    (folder / "rtx4090.json").write_text(json.dumps(other))
    # attention.out and delta.out are one shape.
    assert main(["tune", OUT, "quantised_matmul/delta.out", "--by", "compiled", "--target", "rtx4090"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{OUT} (k6144_n5120_w4g64)" and printed[-1] == f"wrote {folder / 'rtx4090.json'}" and len(printed) == 4
    assert printed[1].startswith("  * columns=32 warps=4 stages=3: 160 blocks, 0 bytes spilled, ")
    written = json.loads((folder / "rtx4090.json").read_text())["quantised_matmul"]
    found = written.pop("k6144_n5120_w4g64")
    assert found.pop("date") and found == {
        "config": {"columns": 32, "warps": 4, "stages": 3},
        "by": "compiled",
        "jax": jax.__version__,
    }
    assert written == other["quantised_matmul"]  # what was there stays

    case = attention_out()
    blocks = lambda target: rows.measure(case, target).blocks  # noqa: E731
    assert blocks("rtx4090") == 5120 // 32
    tune.write(folder / "rtx4090.json", [(case, tune.Candidate(kernel.Config(64, 4, 3), (), ""))], "measured")
    jax.clear_caches()  # what was traced before keeps its block sizes
    assert blocks("rtx4090") == 5120 // 64
    assert blocks("rtx3090") == 5120 // 32, "another card's program got this card's block sizes"
    # A guess does not replace a measurement.
    kept = tune.write(folder / "rtx4090.json", [(case, tune.Candidate(wide, (), ""))], "compiled")
    assert kept == ["quantised_matmul k6144_n5120_w4g64: kept, it was measured"]
    with tuned.card("rtx4090"):
        assert tuned.lookup("quantised_matmul", case.key) == {"columns": 64, "warps": 4, "stages": 3}
        assert tuned.lookup("quantised_matmul", "k2_n2_w4g64") is None and tuned.lookup("softmax", case.key) is None
    assert tuned.lookup("quantised_matmul", case.key) is None, "no card: a CPU"


def test_ranking():
    """No spills before all, then work for every SM, then time; enough warps to issue and loads far enough ahead count."""
    card, config = targets.get("rtx4090"), kernel.Config(64, 4, 3)
    row = rows.Row(
        op="",
        case="",
        target="rtx4090",
        kernel="",
        launches=1,
        blocks=256,
        threads=128,
        registers=64,
        spill_bytes=0,
        smem_bytes=0,
        blocks_per_sm=4,
        occupancy=0.33,
        tensor_core_instructions=8,
        conversions=0,
        loads={},
        bytes_moved=10**8,
        ideal_bytes=10**8,
        requested_bytes=10**8,
        loop_passes=50,
        thread_instructions=10**9,
        thread_instructions_per_byte=10,
        multiply_adds=10**9,
        modelled_us=99.2,
        limit="memory",
    )
    rank = lambda config=config, **other: tune.rank(dataclasses.replace(row, **other), config, card)  # noqa: E731
    slow = rank(modelled_us=120)
    assert rank() < slow < rank(blocks=100) < rank(blocks=100, spill_bytes=8)
    assert rank() < rank(thread_instructions=2 * 10**9) and rank() < rank(requested_bytes=2 * 10**8)
    assert rank(dataclasses.replace(config, stages=4)) < rank() < rank(dataclasses.replace(config, stages=2))
    # 256 blocks of one warp are a warp for every other scheduler: an eighth of the issue rate.
    assert tune.modelled_us(dataclasses.replace(row, threads=32), config, card)[0] == pytest.approx(8e9 / 41.29e6, rel=1e-3)


@pytest.mark.parametrize("path", sorted(tuned.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_block_sizes_fit_their_kernels(path):
    known = {c.key for c in cases.DECODE}
    entries = tuned.read(path)
    assert path.stem in targets.names() and set(entries) <= {"quantised_matmul", "quantised_matmul_triton"}
    for key, found in [item for keys in entries.values() for item in keys.items()]:
        config = kernel.Config(**found["config"])
        assert key in known and quantised.COLUMNS % config.columns == 0 and found["jax"] and found["date"]


def test_a_timing_program_makes_all_its_calls():
    """Neither merged nor left out, no copies of what is updated in place, few small launches a round; so does the copy."""
    case = attention_out()
    for call, arguments, donate, kernels in (
        (case.call, case.arguments(), (), {"w4_decode_add": 6}),
        (*next((c.call, c.arguments(), c.donate) for c in registry.cases(["delta_fold/1x4"])), {"delta_fold": 6}),
    ):
        program = bench.Program.of(call, arguments, donate, rounds=3)
        changing, fixed, shared = program.split(arguments)
        report = inspect.report(program.__call__, [[changing] * 2, [fixed] * 2, shared], donate=(0,))
        assert {name: report.kernels[name].launches for name in kernels} == kernels and report.copies == 0
        assert report.launches <= 6 + 2 * 3
    arguments = [jax.ShapeDtypeStruct((2**28,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)]
    program = bench.copy_program(*arguments)
    changing, fixed, shared = program.split(arguments)
    report = inspect.report(program.__call__, [[changing], [fixed], shared], donate=(0,))
    assert sorted(k.launches for k in report.kernels.values()) == [1, 8] and report.copies == 0 and report.temporary_bytes < 16


def test_a_timing_program_hands_on_what_calls_update():
    program = bench.Program.of(Sum().call, Sum().arguments(), (2,), rounds=5)
    changing, fixed, shared = program.split([jnp.ones(4), jnp.arange(4.0), jnp.int32(7)])
    results, changing = jax.jit(program.__call__)([changing, [jnp.int32(0)]], [fixed, fixed], shared)
    assert [int(c[0]) for c in changing] == [12, 5]
    np.testing.assert_array_equal(results, [np.arange(4.0) + 1] * 2)  # the shared leaf keeps its values


def test_bench_rows(monkeypatch):
    monkeypatch.setattr(bench, "RUNS", 3)
    row = bench.run(Sum(), copy_speed=1e11).json()
    assert {"op", "case", "device", "jax", "backend", "date", "median_us", "spread", "gb_s", "copy_gb_s", "fraction"} <= set(row)
    assert row["median_us"] > 0 and row["gb_s"] == pytest.approx(Sum.ideal_bytes / row["median_us"] / 1e3)
    assert row["copy_gb_s"] == 100 and row["fraction"] == pytest.approx(row["gb_s"] / 100)
    # 12 MiB a call, three times 128 MiB a round, and 4 ms a program.
    assert row["copies"] == 32 and row["calls"] == 32


def test_copies_and_calls():
    mib = 2**20
    assert bench.copies_needed(17 * mib, 16 * mib, 72 * mib) == 14
    assert bench.copies_needed(mib, mib, 72 * mib) == 64
    assert bench.copies_needed(2 * 10**9, 10 * mib, 72 * mib) == 2
    assert bench.copies_needed(8 * 10**9, 8 * 10**9, 72 * mib) == 1
    assert bench.calls_needed(17e-6, 14) == 238 and bench.calls_needed(1e-6, 10) == 260 and bench.calls_needed(1, 3) == 3
    assert bench.copy_bytes_per_second(2**16) > 0


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["report", "softmax"], "OP: no kernel 'softmax'; known: "),
        (["report", "--target", "rtx2080"], "target: unknown card 'rtx2080'; known: a100"),
        (["report", OUT, "--jobs", "0"], "--jobs: 0 processes, must be at least 1"),
        (["report", OUT, "--compare", "no/such.json"], "--compare no/such.json: No such file or directory"),
        (["report", OUT, "--compare", __file__], f"--compare {__file__}: not JSON, as `report --json` writes it"),
        (["check", OUT, "--json", "no/such.json"], "--json no/such.json: no is no directory"),
        (["bench", OUT, "--json", "tests"], "--json tests: is a directory, name a file"),
        (["report", OUT, "--plot", "no/such.png"], "--plot no/such.png: no is no directory"),
        (["tune", OUT, "--out", "no/such.json"], "--out no/such.json: no is no directory"),
        (["bench", OUT], f"OP: no CPU kernel '{OUT}'; known: "),
        (["bench", "softmax"], "OP: no CPU kernel 'softmax'; known: "),
        (["tune"], "tune needs a GPU, and JAX sees none here (its backend is cpu); `tune --by compiled --target CARD`"),
        (["tune", "--by", "compiled"], "--target: which card to compile for: a100, "),
        (["tune", "--by", "compiled", "--target", "rtx2080"], "target: unknown card 'rtx2080'; known: a100"),
        (["tune", "head", "--by", "compiled", "--target", "a100"], "OP: no case of head offers block sizes to choose from"),
        (["tune", OUT, "--by", "compiled", "--target", "a100", "--jobs", "-1"], "--jobs: -1 processes, must be at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_a_trace_for_one_card_is_not_reused_for_another(folder):
    for name, columns in (("rtx4090", 64), ("a100", 32)):
        (folder / f"{name}.json").write_text(json.dumps({"op": {"key": entry(columns=columns)}}))
    found = jax.jit(lambda: jnp.int32((tuned.lookup("op", "key") or {"columns": 0})["columns"]))
    for name, columns in (("rtx4090", 64), ("a100", 32), ("h200", 0), ("rtx4090", 64)):
        with tuned.card(name):
            assert found() == columns
    assert found() == 0


def test_a_file_of_something_else_is_not_read(folder):
    (folder / "rtx4090.json").write_text('{"quantised_matmul": {"k1_n1_w4g64": {"columns": 64}}}')
    with tuned.card("rtx4090"), pytest.raises(ValueError, match="rtx4090.json: not a file of tuned block sizes; "):
        tuned.lookup("quantised_matmul", "k1_n1_w4g64")


def test_cards_are_known_by_the_name_they_give_themselves():
    assert targets.of_device("NVIDIA GeForce RTX 4090") == "rtx4090" and targets.of_device("NVIDIA L4") is None
    # The makers' rates, in multiply-adds.
    for name, dense_16, dense_8 in (
        ("a100", 312, 624),
        ("rtx3090", 71, 284),
        ("rtx4090", 165.2, 660.6),
        ("h200", 989.4, 1978.9),
        ("rtx5090", 209.5, 838),
    ):
        card = targets.get(name)
        assert card.tensor_16 * 2e-12 == pytest.approx(dense_16, rel=0.005)
        assert card.tensor_8 * 2e-12 == pytest.approx(dense_8, rel=0.005)
    assert {n: targets.get(n).blocks_per_sm for n in targets.names()} == {
        "a100": 32,
        "h200": 32,
        "rtx3090": 16,
        "rtx4090": 24,
        "rtx5090": 24,
    }
