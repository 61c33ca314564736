"""`bench startup`: its phases are those of a real process, and the command that measures them."""

import json

import pytest
from typer.testing import CliRunner

from ninfer_jax.bench import startup
from ninfer_jax.bench.startup import PHASES, Start, rows, starts
from ninfer_jax.cli.main import app

SHAPES = dict(context=256, prefill_chunk=64, kv="f32")


@pytest.mark.long
@pytest.mark.engine
def test_a_cold_start_compiles_and_a_warm_one_does_not(micro_path):
    cold, warm = starts(str(micro_path), SHAPES, {}, 1)
    assert (cold.kind, warm.kind) == ("cold", "warm")
    assert set(cold.seconds) == set(warm.seconds) == set(PHASES)
    assert cold.compilations > 0 == warm.compilations and cold.bytes == warm.bytes > 0
    assert min(cold.seconds.values()) >= 0 and cold.total > 0


def test_what_the_engine_refuses_is_said_in_its_words(micro_path):
    with pytest.raises(ValueError, match=r"^context is 1048576, it must be from 1 to 262144$"):
        list(starts(str(micro_path), SHAPES | {"context": 1 << 20}, {}, 0))


def start(kind: str, seconds: float, compilations: int) -> Start:
    return Start(kind, dict.fromkeys(PHASES, seconds), 3_000_000_000, compilations, "cpu")


FOUND = [start("cold", 2.0, 13), start("warm", 0.5, 0), start("warm", 1.5, 0), start("warm", 1.0, 0)]


def test_the_table_has_medians_a_total_and_the_rate():
    table = {phase: figures for phase, *figures in rows(FOUND)}
    assert list(table) == [*PHASES, "total", "weights, GB/s", "compiled programs"]
    assert table["weights"] == ["2.00", "1.00"] and table["total"] == ["12.00", "6.00"]
    assert table["weights, GB/s"] == ["1.50", "3.00"] and table["compiled programs"] == ["13", "0"]
    assert {phase: figures for phase, *figures in rows(FOUND[:1])}["total"] == ["12.00", ""]


def test_the_command_prints_a_table_or_json(micro_path, monkeypatch):
    asked = []
    monkeypatch.setattr(startup, "starts", lambda *given: asked.append(given) or iter(FOUND))
    done = CliRunner().invoke(app, ["bench", "startup", str(micro_path), "--context", "256"])
    assert done.exit_code == 0 and "first token" in done.stdout and "12.00" in done.stdout
    assert asked[0][1]["context"] == 256 and asked[0][3] == 3
    done = CliRunner().invoke(app, ["bench", "startup", str(micro_path), "--json"])
    assert [s["total"] for s in json.loads(done.stdout)["starts"]] == [12.0, 3.0, 9.0, 6.0]
    done = CliRunner().invoke(app, ["bench", "startup", str(micro_path), "--warm", "-1"])
    assert done.exit_code == 1 and "--warm is -1" in done.stderr


def test_a_model_is_still_the_first_word_of_bench(tmp_path):
    done = CliRunner().invoke(app, ["bench", str(tmp_path / "nothing"), "--prompt", "8"])
    assert done.exit_code == 1 and "nothing" in done.stderr and "startup" not in done.stderr
