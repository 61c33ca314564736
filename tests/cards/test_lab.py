"""The lab's commands, on one small-to-compile case."""

import json

import pytest

from pallas_kernels.lab import registry, rows
from pallas_kernels.lab.__main__ import main

CASE = "quantised_matmul/attention.out"


def test_list_names_every_case(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out.split()
    assert CASE in printed and "head/argmax" in printed
    assert len(printed) == len(set(printed)) == len(registry.cases())


def test_report_json_plot_and_compare(tmp_path, capsys):
    file, plot = tmp_path / "rows.json", tmp_path / "roofline.png"
    assert main(["report", CASE, "--target", "rtx4090", "--json", str(file), "--plot", str(plot)]) == 0
    (row,) = json.loads(file.read_text())
    assert {"op", "case", "target", "registers", "spill_bytes", "smem_bytes", "occupancy", "tensor_core_instructions"} <= set(row)
    # 6144 x 5120 at 4 bits and a bf16 scale per 64: 15.7 + 1.0 MB; x, residual and output on top.
    weight = 6144 * 5120 // 2 + 6144 * 5120 // 64 * 2
    assert row["bytes_moved"] == row["ideal_bytes"] == weight + 2 * 16 * (6144 + 2 * 5120)
    assert row["modelled_us"] == pytest.approx(row["bytes_moved"] / 1008e3) and row["limit"] == "memory"
    assert plot.read_bytes().startswith(b"\x89PNG")
    old = row | {"registers": row["registers"] + 1}
    changed = rows.compare([old, row | {"case": "gone"}], [rows.Row(**row)])
    assert changed.splitlines() == [
        f"{CASE}: registers {row['registers'] + 1} -> {row['registers']}",
        "quantised_matmul/gone: not in the new report",
    ]


def test_check_interprets_small_twins_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "check.json"
    assert main(["check", CASE, "head/top_k", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [r["mode"] for r in results] == ["interpreted"] * 2 and all(r["passed"] for r in results)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["report", "softmax"], "error: OP: no kernel 'softmax'; known: "),
        (["report", "--target", "rtx2080"], "error: target: unknown card 'rtx2080'; known: a100"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1
