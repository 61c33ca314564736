"""The command: what it prints, in which form, and its exit code."""

import json

import pytest
from typer.testing import CliRunner

from ninfer_jax.cli.main import app
from ninfer_jax.doctor import FINE, NOTE, WRONG, Finding


@pytest.fixture
def doctor(monkeypatch):
    """(findings, options) -> what the command does when it finds these."""

    def run(findings, *options):
        monkeypatch.setattr("ninfer_jax.doctor.read", lambda: None)
        monkeypatch.setattr("ninfer_jax.doctor.judge_host", lambda inputs: findings)
        monkeypatch.setattr("ninfer_jax.doctor.judge_card", lambda inputs: [])
        monkeypatch.setattr("ninfer_jax.doctor.self_test", lambda inputs: [Finding("self-test: cpu", FINE, "as it should")])
        return CliRunner().invoke(app, ["doctor", *options])

    return run


OKAY = Finding("disk", NOTE, "it is [slow]", "keep models elsewhere", {"read_bytes_s": 5})
BAD = Finding("driver", WRONG, "there is none", "install one")


def test_exit_code_and_lines(doctor):
    done = doctor([OKAY])
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "note  disk: it is [slow]",
        "      -> keep models elsewhere",
        "fine  self-test: cpu: as it should",
    ]
    assert doctor([OKAY, BAD]).exit_code == 1
    assert "self-test" not in doctor([OKAY], "--no-test").stdout


def test_json_and_report(doctor):
    done = doctor([OKAY, BAD], "--json")
    found = json.loads(done.stdout)["findings"]
    assert done.exit_code == 1 and [f["name"] for f in found] == ["disk", "driver", "self-test: cpu"]
    assert found[0] == {
        "name": "disk",
        "status": "note",
        "text": "it is [slow]",
        "advice": "keep models elsewhere",
        "facts": {"read_bytes_s": 5},
    }
    assert doctor([OKAY, BAD], "--report").stdout.splitlines()[1:] == [
        "note  disk: read_bytes_s 5",
        "wrong driver",
        "fine  self-test: cpu",
    ]
    refused = doctor([OKAY], "--report", "--json")
    assert refused.exit_code == 1 and refused.stderr.count("\n") == 1 and "leave one of them out" in refused.stderr
