"""`ninfer-jax eval`: figures as a table and as JSON, pictures, and one line for what cannot be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from sample_text import TEXT
from typer.testing import CliRunner

from ninfer_jax import Engine
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.cli.evaluate import Job
from ninfer_jax.cli.main import app
from ninfer_jax.evaluate.divergence import compare, decode_logprobs
from ninfer_jax.evaluate.perplexity import text_loss


@pytest.fixture
def invoke(monkeypatch, tmp_path, engine, coarse_engine):
    """Runs the command in this process with the engines loaded already; returns (exit code, stdout, stderr, JSON or None)."""
    file, out = tmp_path / "text.txt", tmp_path / "figures.json"
    file.write_bytes(TEXT.encode())
    asked = []

    def load(path, config, *, verify, progress):
        assert path in (tiny_path(), Path("checkpoint"))
        asked.append(config)
        call.paths.append(path)
        call.verified = verify
        progress("weights", 1, 1)
        return coarse_engine if config.kv == "rk4v4" else engine

    monkeypatch.setattr(Engine, "load", load)

    def call(measure: str, *arguments: str, text=file):
        command = ["eval", "tiny", measure, "--text", str(text), "--json", str(out), *arguments]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
        return result.exit_code, result.stdout, result.stderr, json.loads(out.read_text()) if out.exists() else None

    call.asked, call.paths = asked, []
    return call


def test_ppl(invoke, engine, coarse_engine, ids):
    code, stdout, stderr, figures = invoke("ppl", "--kv", "f32,rk4v4", "--window", "128", "--stride", "64", "--tokens", "150")
    assert code == 0, stderr
    expected = [text_loss(e, ids[:150], 128, 64) for e in (engine, coarse_engine)]
    assert [r["nats"] for r in figures["results"]] == [e.nats for e in expected]
    assert [(c.kv, c.context) for c in invoke.asked] == [("f32", 128), ("rk4v4", 128)] and invoke.verified
    assert figures["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest() and figures["measure"] == "ppl"
    assert figures["options"] == {"window": 128, "stride": 64, "tokens": 150} and figures["device"] == engine.device
    for loss in expected:
        assert f"{loss.nats_per_token:.4g}" in stdout and loss.kv in stdout


def test_kld_with_a_picture(invoke, engine, coarse_engine, ids, tmp_path):
    pictures = tmp_path / "pictures"
    arguments = ("--kv", "rk4v4", "--reference", "f32", "--depths", "0,64", "--tokens", "5", "--plot", str(pictures))
    code, _, stderr, figures = invoke("kld", *arguments)
    assert code == 0, stderr
    exact, coarse = (decode_logprobs(e, ids, [0, 64], 5) for e in (engine, coarse_engine))
    expected = [compare("rk4v4", d, a, b, ids[d + 1 : d + 6]).kl for d, a, b in zip((0, 64), exact, coarse, strict=True)]
    assert [r["kl"] for r in figures["results"]] == expected and all(expected)
    picture = (pictures / "kld.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and 3000 < len(picture) < 100_000


def test_kld_against_another_model(invoke, engine, ids, monkeypatch, tmp_path):
    """The reference is the other model; without --kv both have the reference's format."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    arguments = ("--against", "checkpoint", "--reference", "f32", "--depths", "0,64", "--tokens", "5")
    code, _, stderr, figures = invoke("kld", "--kv", "rk4v4", *arguments)
    assert code == 0, stderr
    assert invoke.paths == [Path("checkpoint"), tiny_path()] and [c.kv for c in invoke.asked] == ["f32", "rk4v4"]
    assert [r["kv"] for r in figures["results"]] == ["rk4v4"] * 2 and all(r["kl"] > 0 for r in figures["results"])
    assert figures["options"]["against"] == "checkpoint"
    code, _, stderr, figures = invoke("kld", *arguments)
    assert code == 0 and [(r["kv"], r["kl"]) for r in figures["results"]] == [("f32", 0.0)] * 2, stderr
    texts = iter((ids, ids[1:]))
    monkeypatch.setattr(Job, "ids", lambda job, engine: next(texts))
    code, _, stderr, _ = invoke("kld", *arguments)
    assert code == 1 and stderr.strip().splitlines()[-1].startswith("error: --against checkpoint: its tokenizer makes other ids")


def test_the_others(invoke, tmp_path):
    runs = {
        "drift": ("--tokens", "64", "--every", "64", "--prefill-chunk", "64"),
        "acceptance": ("--drafts", "3", "--prompts", "2", "--prompt-tokens", "32", "--max-new", "16"),
        "needle": ("--lengths", "100", "--depths", "0,1", "--trials", "1"),
    }
    for measure, arguments in runs.items():
        code, stdout, stderr, figures = invoke(measure, *arguments, "--plot", str(tmp_path))
        assert code == 0, (measure, stderr)
        assert len(figures["results"]) == {"drift": 2, "acceptance": 1, "needle": 2}[measure]
        assert measure in stdout and (tmp_path / f"{measure}.png").read_bytes().startswith(b"\x89PNG")
    assert invoke.asked[1].draft == 3 and invoke.verified
    assert invoke("ppl", "--tokens", "40", "--window", "32", "--stride", "16", "--no-verify")[0] == 0 and not invoke.verified


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ppl", "--depths", "1"), "--depths goes with kld, needle, not with ppl"),
        (("kld", "--max-new", "3"), "--max-new goes with acceptance, not with kld"),
        (("ppl", "--chat"), "--chat goes with needle, not with ppl"),
        (("kld",), "kld: give the formats to compare with bf16 as --kv"),
        (("kld", "--kv", "rk4v4", "--depths", "a"), "--depths 'a': give numbers by commas"),
        (("kld", "--kv", "rk4v4", "--depths", "1,1"), "--depths '1,1': no negative numbers and none twice"),
        (("kld", "--kv", "int9"), "kv format 'int9' is unknown"),
        (("kld", "--kv", "rk4v4", "--reference", "float64"), "kv format 'float64' is unknown"),
        (("needle", "--depths", "0,2"), "a needle's place is from 0 (beginning) to 1 (end)"),
        (("acceptance", "--drafts", "6"), "K is from 1 to 5"),
        (("drift", "--kv", "f32,int8"), "drift: give one format as --kv"),
        (("ppl", "--stride", "4000"), "stride is 4000, it must be from 1 to the window of 2048"),
    ],
)
def test_one_line_for_what_cannot_be(invoke, arguments, message):
    code, stdout, stderr, figures = invoke(*arguments)
    assert code == 1 and stdout == "" and figures is None
    assert stderr.startswith("error: ") and message in stderr and len(stderr.splitlines()) == 1


def test_texts_that_cannot_be_read(invoke, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    for name, message in (("missing.txt", "No such file"), ("latin1.txt", "not UTF-8 (byte 3)")):
        code, _, stderr, _ = invoke("ppl", text=tmp_path / name)
        assert code == 1 and message in stderr and name in stderr and len(stderr.splitlines()) == 1
