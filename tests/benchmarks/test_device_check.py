"""`benchmarks/device_check.py` in miniature: every step runs, what it writes is true to itself, and limits cost only the rest."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import FUNCTIONAL

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from device import around, kernels, random_model, whole_model  # noqa: E402
from device.report import Report, markdown  # noqa: E402

from ninfer_jax.model import TextModel, parameters_of  # noqa: E402
from ninfer_jax.programs.executables import MANIFEST  # noqa: E402
from pallas_kernels import deviceless  # noqa: E402
from pallas_kernels.matmul import QuantisedWeight, dequantise  # noqa: E402

TINY = whole_model.TINY
ONE_SLOT = f"1 slot, {TINY.engine.draft} drafts"


def command(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(BENCHMARKS / "device_check.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=FUNCTIONAL, timeout=600)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Executables of the first configuration, as `ninfer-jax compile` writes them."""
    out = tmp_path_factory.mktemp("programs")
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from device.whole_model import TINY
from ninfer_jax.programs.executables import compile_to
compile_to(pathlib.Path({str(out)!r}), TINY.setup(1, TINY.engine.draft), "cpu")
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=FUNCTIONAL, timeout=600)
    return out


@pytest.fixture(scope="module")
def results(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("check")
    done = command("--tiny", "--minutes", "30", "--out", str(out), "--programs", str(compiled))
    assert done.returncode == 0, done.stderr
    content = json.loads((out / "results.json").read_text())
    assert (out / "results.md").read_text() == markdown(content)
    return {s["name"]: {"left out": s["left_out"], **{i["name"]: i for i in s["items"]}} for s in content["stages"]}


def test_every_stage_ran_and_only_what_needs_a_gpu_was_left_out(results: dict) -> None:
    assert list(results) == ["environment", "numbers", "compile", "times", "model", "executables"]
    left_out = [(x["name"], x["why"]) for stage in results.values() for x in stage["left out"]]
    assert left_out and all("GPU" in why for _, why in left_out), left_out
    assert results["environment"]["versions"]["jax"] == jax.__version__
    assert not [item for stage in results.values() for item in stage.values() if "failed" in item]


def test_every_op_was_checked_or_is_named(results: dict) -> None:
    checked = {name.partition("/")[0] for name in results["numbers"] if name != "left out"}
    assert checked == set(kernels.TINY_OPS)
    ops = checked | {x["name"] for x in results["numbers"]["left out"]}
    assert ops >= {"quantised_matmul", "head", "kv_append", "decode_attention", "prefill_attention"}
    assert ops >= {"delta_decode", "delta_fold", "delta_prefill"}
    assert {x["name"] for x in results["times"]["left out"]} == {f"{op}: times" for op in ops}
    assert results["times"]["add/xla"]["median_us"] > 0 and results["times"]["copy"]["gb_s"] > 0


def test_forced_drafts_are_all_accepted_and_rates_follow_from_rounds(results: dict) -> None:
    """A round with all drafts accepted emits K + 1 tokens; the same programs loaded from files do the same."""
    width, found = TINY.engine.draft + 1, 0
    for stage, items in (("model", results["model"]), ("executables", results["executables"])):
        for name, item in items.items():
            if name == "left out" or "all accepted: accepted" not in item:
                continue
            found += 1
            assert item["all accepted: accepted"] == 1.0, (stage, name)
            per_round = item["all accepted: tokens_per_s"] * item["all accepted: ms_per_round"] / 1e3
            assert per_round == pytest.approx(width * len(item["depths"])), (stage, name)
            assert item["accepted"] < 1  # random weights: what the MTP head proposes is not what comes
    assert found == len(TINY.depths) + 1
    plain = results["model"]["2 slots, plain: decode at 512 + 64"]
    assert plain["tokens_per_s"] * plain["ms_per_round"] / 1e3 == pytest.approx(2)
    assert plain["depths"] == [512 - 6, 64]  # room for 5 rounds and a token more


def test_memory_is_planned_from_the_arrays(results: dict) -> None:
    plan = results["model"][f"{ONE_SLOT}: memory"]
    assert plan["planned_weights_bytes"] == results["model"]["weights"]["bytes"]
    assert plan["planned_total_bytes"] == sum(v for k, v in plan.items() if k.startswith("planned") and "total" not in k)
    # 8 pages and nobody's in two pools; a vector of 64 has 32 + 2 bytes, keys and values of 2 heads
    assert plan["planned_kv_bytes"] == 2 * 9 * 64 * 2 * 2 * (32 + 2)


def test_without_a_gpu_one_line_says_so_and_compiling_goes_on(tmp_path: Path) -> None:
    done = command("--ops", "delta_fold/1x4", "--target", "rtx4090", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("no GPU here")]
    (stage,) = (s for s in json.loads((tmp_path / "results.json").read_text())["stages"] if s["name"] == "kernels")
    if missing := deviceless.missing_tools():
        assert all(wheel in stage["left_out"][0]["why"] for wheel in missing)
    else:
        assert stage["items"][0]["name"] == "delta_fold/1x4" and stage["items"][0]["registers"] > 16


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--minutes", "0"), "--minutes is 0"),
        (("--target", "voodoo2"), "unknown card 'voodoo2'"),
        (("--programs", "/nowhere"), "/nowhere is no directory"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = command(*arguments, "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_step_that_would_not_fit_is_named_and_what_was_found_is_on_disk(tmp_path: Path) -> None:
    report = Report(tmp_path, 1.0, {"what": "test"})
    with report.stage("first", "steps", until=0.5) as stage:
        assert stage.run("short", lambda: {"n": 1}, guess=1) == {"n": 1}
        assert json.loads((tmp_path / "results.json").read_text())["stages"][0]["items"][0]["n"] == 1  # not only at the end
        assert stage.run("long", lambda: pytest.fail("must not run"), kind="other", guess=31) is None
        assert stage.run("broken", lambda: 1 / 0) is None
    with report.stage("second", "raises itself", until=1.0):
        raise RuntimeError("no memory\nand much more")
    first, second = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert first["left_out"] == [{"name": "long", "why": "30 s left, about 31 s needed"}]
    assert first["items"][1]["failed"].startswith("ZeroDivisionError")
    assert second["items"] == [{"name": "the stage itself", "failed": "RuntimeError: no memory"}]
    assert report.failed


def test_a_step_that_never_ends_is_given_up_and_named(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from device import report
report.GRACE = 0.2
r = report.Report(__import__("pathlib").Path({str(tmp_path)!r}), 0.3 / 60, {{"what": "test"}})
with r.watched(), r.stage("only", "hangs", until=1.0) as stage:
    stage.run("done before", lambda: {{"n": 7}})
    stage.run("compiler", lambda: time.sleep(60))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and "stopped at the end of the budget" in done.stderr
    (stage,) = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert stage["items"][0]["n"] == 7 and stage["seconds"] is None
    assert [x["name"] for x in stage["left_out"]] == ["compiler"]


def test_numbers_that_do_not_hold_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(kernels.Add):
        multiply_adds, allowed_error = 0, 1e-3

        def call(self, x, one, interpret):
            return x + 1.01 * one

        def reference(self, x, one):
            return x + one

    monkeypatch.setattr(kernels.registry, "cases", lambda **_: [Wrong(elements=64)])
    report = Report(tmp_path, 1.0, {"what": "test"})
    with report.stage("numbers", "wrong", until=1.0) as stage:
        kernels.numbers(stage, False, None)
    assert report.failed and stage.items[0]["relative_error"] > 5e-3


def test_executables_of_another_configuration_are_refused_with_the_command_that_makes_the_right_ones(tmp_path: Path) -> None:
    report = Report(tmp_path / "out", 1.0, {"what": "test"})
    (tmp_path / MANIFEST).write_text(json.dumps({"configuration": "another"}))
    with report.stage("executables", "refused", until=1.0) as stage:
        around.executables(stage, tmp_path, dataclasses.replace(TINY, preset="qwen3_8_27b"), whole_model.Weights())
    (item,) = stage.items
    assert "none of the configurations" in item["failed"] and "ninfer-jax compile qwen3_8_27b" in item["failed"]
    (tmp_path / MANIFEST).write_text("{")
    with report.stage("executables", "refused", until=1.0) as stage:
        around.executables(stage, tmp_path, TINY, whole_model.Weights())
    assert MANIFEST in stage.items[0]["failed"]


def test_drawn_weights_have_the_size_that_keeps_activations_and_zeros_in_the_padding() -> None:
    setup = TINY.setup(1, TINY.engine.draft)
    model = setup.text_model()
    arrays = random_model.draw_arrays(model, 0)
    (parameter,) = (p for p in parameters_of(model) if p.name == "lm_head")  # 300 columns: padded
    stored, (tensor,) = parameter.stored, parameter.tensors
    words, scales, unit = (arrays[f"lm_head.{field}"] for field in stored.fields)
    weight = QuantisedWeight(words, scales, unit, stored.bits, stored.group, (tensor.shape[1], tensor.shape[0]))
    values = np.asarray(dequantise(weight))
    assert values.std() * np.sqrt(values.shape[0]) == pytest.approx(1.0, rel=0.1)
    assert scales.shape[1] > 300 and not np.asarray(unit[300:]).any()
    assert np.asarray(jax.lax.bitcast_convert_type(words, jnp.int8)).min() == -127  # -128 is no code
    # The model without its MTP head has the very same weights.
    plain = random_model.draw_arrays(TextModel(setup.model, jnp.bfloat16, mtp=False, recipe=setup.recipe), 0)
    assert set(plain) < set(arrays)
    assert all(np.array_equal(plain[n], arrays[n]) for n in ("lm_head.words", "layers.3.mlp.down_proj.words"))


def test_tables_give_every_slot_pages_of_its_own() -> None:
    rows = random_model.tables((130, 0, 64), room=10, pages=7, per_slot=4, page=64, seed=1)
    assert (rows > 0).sum(axis=1).tolist() == [3, 0, 2]
    assert len(set(rows[rows > 0].tolist())) == 5
    with pytest.raises(ValueError, match="slot 1 need 3 pages"):
        random_model.tables((190, 130), room=10, pages=7, per_slot=5, page=64, seed=1)


def test_the_whole_size_goes_with_its_programs_and_pools() -> None:
    """Nothing of it can run here: its configurations resolve, drawn arrays have the shapes that programs take, depths fit."""
    size = whole_model.WHOLE
    assert [(s.shape.slots, s.shape.draft) for s in size.setups.values()] == [(1, 3), (1, 0), (4, 3), (4, 0)]
    setup = size.setup(4, 3)
    model = setup.text_model()
    drawn = jax.eval_shape(lambda: random_model.parameters_from(model, random_model.draw_arrays(model, 0)))
    _, (wanted, state), _ = setup.programs().source("decode_round")
    assert [(x.shape, x.dtype) for x in drawn] == [(x.shape, x.dtype) for x in wanted]
    filled = jax.eval_shape(lambda s: random_model.fill_pages(s, 0), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), filled) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for depths, shape in [*(((d,), size.setup(1, 3).shape) for d in size.depths), *((d, setup.shape) for d in size.shared)]:
        depths, room, _ = whole_model.reach(size, shape, depths)
        random_model.tables(depths, room, shape.pages, shape.pages_per_slot, 64, 0)
    assert depths[0] > 261_500 and len(depths) == 4
