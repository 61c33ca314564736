"""`ninfer-jax bench` from its arguments to its files, on a loaded engine."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine
from ninfer_jax.bench import device
from ninfer_jax.cli.main import app

COMMON = ("--draft", "3", "--slots", "2", "--kv", "f32", "--context", "512", "--prefill-chunk", "64", "--repeats", "2")


@pytest.fixture
def bench(monkeypatch, engine):
    """Runs the command with the engine loaded already; `bench.loaded` are the configurations it asked for."""
    loaded = []

    def load(path, config, *, verify, progress):
        loaded.append(config)
        call.verified = verify
        progress("programs", 1, 1)
        return engine

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(device, "_source", lambda: "sources")  # a checkout may be edited while its tests run

    def call(*arguments: object, exit_code: int = 0):
        result = CliRunner().invoke(app, ["bench", "tiny", *map(str, arguments)])
        assert result.exit_code == exit_code, result.output
        return result

    call.loaded = loaded
    return call


@pytest.mark.long
def test_a_matrix_with_all_its_files(bench, tmp_path):
    file, table, plots = tmp_path / "r.json", tmp_path / "r.csv", tmp_path / "plots"
    lists = ("--prompt", "32,64", "--gen", "6", "--depth", "0,64")
    done = bench(*lists, *COMMON, "--json", file, "--csv", table, "--plot", plots)
    assert [(c.context, c.kv, c.draft, c.slots, c.prefill_chunk) for c in bench.loaded] == [(512, "f32", 3, 2, 64)]
    rows = json.loads(file.read_text())["rows"]
    assert [(r["cell"]["depth"], r["cell"]["prompt"]) for r in rows] == [(0, 32), (0, 64), (64, 32), (64, 64)]
    for r in rows:
        assert r["how"] == "measured" and len(r["samples"]) == 2
        assert {(s["prefill_tokens"], s["decode_tokens"]) for s in r["samples"]} == {(2 * r["cell"]["prompt"], 10)}
        assert all((s["fill_s"] > 0) == (r["cell"]["depth"] > 0) and s["prefill_s"] > 0 < s["decode_s"] for s in r["samples"])
        assert r["settings"]["corpus"].startswith("standard library of Python 3")
    assert len(table.read_text().splitlines()) == 5
    assert sorted(p.name for p in plots.iterdir()) == ["acceptance_by_draft.png", "memory_by_context.png", "speed_by_depth.png"]
    assert sum(line.startswith("│") for line in done.stdout.splitlines()) == 4
    assert done.stderr.splitlines()[0].startswith("auto: pool 1,024 ")  # the rest is set
    assert done.stderr.splitlines()[1] == "1 of 4: prompt 32, gen 6, depth 0, kv f32, K 3, slots 2, context 512: measured"

    assert bench.verified
    bench("--prompt", "8", "--gen", "2", *COMMON, "--no-verify")
    assert not bench.verified and bench.loaded.pop()

    # All of it is there: nothing is loaded, and the new rows are the old ones.
    again = bench(*lists, *COMMON, "--json", file, "--resume", "--compare", file)
    assert len(bench.loaded) == 1
    assert again.stdout.count("1.000x ~") == 4 * 3 and "differs" not in again.stdout
    bench(*lists, *COMMON, "--warmup", "0", "--json", file, "--resume")
    assert len(bench.loaded) == 2 and len(json.loads(file.read_text())["rows"]) == 8


def test_what_cannot_fit_is_refused_and_the_rest_runs(bench, tmp_path):
    corpus = tmp_path / "c.txt"
    corpus.write_text("".join(f"ACT {i}. Enter the {i}th Gentleman.\n" for i in range(60)), "utf-8")
    done = bench("--prompt", "16,1000", "--gen", "2", *COMMON, "--corpus", corpus)
    assert "context: 1002 tokens are needed, --context is 512" in done.stderr
    done = bench("--prompt", "16,250", "--gen", "2", *COMMON, "--corpus", corpus)
    assert "corpus: 1,500 tokens are needed (3 runs x 2 slots x 250), c.txt" in done.stderr
    none = bench("--prompt", "1000", *COMMON, exit_code=1)
    assert none.stderr.splitlines()[-1] == "error: every cell was refused"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "64;128"), "--prompt is '64;128', it must be whole numbers separated by commas"),
        (("--depth", "1,,2"), "--depth is '1,,2'"),
        (("--kv", "f32,rk9"), "rk9"),
        (("--depth", "100"), "depth is 100, it must be a multiple of the prefill chunk 512; the nearest is 512"),
        (("--repeats", "0"), "repeats is 0, it must be at least 1"),
        (("--resume",), "--resume needs --json FILE"),
        (("--json", "HERE/there.json"), "is there already; go on with it by --resume"),
        (("--csv", "HERE/no/r.csv"), "there is no directory"),
        (("--plot", "HERE/there.json"), "there.json is a file"),
        (("--compare", "HERE/there.json"), "there.json: not a file of `ninfer-jax bench --json`"),
        (("--corpus", "HERE/gone.txt"), "gone.txt: No such file"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(bench, tmp_path, arguments, words):
    (tmp_path / "there.json").write_text("{}")
    done = bench(*(a.replace("HERE", str(tmp_path)) for a in arguments), exit_code=1)
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ") and words in done.stderr
    assert not bench.loaded and not done.stdout
    assert (tmp_path / "there.json").read_text() == "{}"


def test_a_model_that_is_none(bench):
    result = CliRunner().invoke(app, ["bench", "/nowhere"])
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and "/nowhere" in result.stderr
