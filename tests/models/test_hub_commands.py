"""The command line in processes of its own, with an empty home and a Hub on loopback: a name, and an answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hub_server import Hub, Repository, repository_of

from ninfer_jax.models import kept

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ("--context", "256", "--kv", "f32", "--prefill-chunk", "64", "--slots", "2")


@pytest.fixture
def begin(hub: Hub, home: Path):
    """Starts a command that sees no other Hub, cache or token."""
    begun = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        own |= {"HF_ENDPOINT": hub.url, "HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "300"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun.append(subprocess.Popen([sys.executable, "-m", "ninfer_jax", *arguments], env=own, **pipes))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def refused(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and not out and "Traceback" not in errors, errors
    return errors


def test_what_cannot_be_fetched_ends_generate_and_serve_with_one_line(begin, hub: Hub) -> None:
    hub.repositories["org/gated"] = Repository({"config.json": b"{}", "model.safetensors": b"x" * 9000}, gated=True)
    said = refused(begin("generate", "org/none", "--prompt", "x", *SHAPE))
    assert said.count("\n") == 1 and said.startswith("error: org/none: http") and "has no such repository" in said
    *_, last = refused(begin("serve", "org/gated", "--port", "0", *SHAPE)).splitlines()
    assert last.startswith("error: org/gated is gated: accept its conditions")


def test_a_server_listens_while_it_fetches(begin, hub: Hub, micro_path: Path) -> None:
    hub.repositories["org/micro"] = repository_of(micro_path)
    hub.hold.clear()
    server = begin("serve", "org/micro", "--port", "0", *SHAPE)
    assert server.stderr is not None
    url = next(line for line in server.stderr if line.startswith("listening on ")).split()[2].rstrip(",")
    assert hub.held.wait(60)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/health", timeout=60)
    assert caught.value.code == 503 and json.load(caught.value)
    hub.repositories["org/micro"].wrong.add("model.safetensors")
    hub.hold.set()
    assert "error: org/micro: what came for model.safetensors is not what" in server.stderr.read()
    assert server.wait(60) == 1


@pytest.mark.long
def test_a_name_and_an_answer_whatever_was_killed_before(begin, hub: Hub, home: Path, micro_path: Path) -> None:
    hub.repositories["org/micro"] = repository_of(micro_path)
    asked = ("generate", "org/micro", "--prompt", "a b c", "--greedy", "--max-new", "5", "--recipe", "q4", *SHAPE, "--json")
    first = begin(*asked)
    assert first.stderr is not None
    assert next(line for line in first.stderr if "is converted once, recipe q4" in line)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not list(kept.root().glob("org--micro/*/manifest.json"))
    out, errors = (second := begin(*asked)).communicate(timeout=300)
    assert second.returncode == 0, errors
    tokens = json.loads(out)["tokens"]
    assert len(tokens) == 5
    assert hub.served["org/micro/model.safetensors"] == (micro_path / "model.safetensors").stat().st_size
    # From now on neither the Hub nor its cache is needed.
    shutil.rmtree(home / ".cache" / "huggingface")
    requests = len(hub.asked)
    out, errors = (third := begin(*asked)).communicate(timeout=300)
    assert third.returncode == 0 and json.loads(out)["tokens"] == tokens and "converted" not in errors, errors
    assert len(hub.asked) == requests
