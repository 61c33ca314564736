"""`ninfer-jax launch`: what it prints is what the clients read."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib

import pytest
from typer.testing import CliRunner

from ninfer_jax.cli.launch import CLIENTS, settings_for
from ninfer_jax.cli.main import app

URL = "http://127.0.0.1:9000"


def printed(client: str, *options: str) -> str:
    done = CliRunner().invoke(app, ["launch", client, "--url", URL, "--model", "my model", *options], prog_name="ninfer-jax")
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("client", ["claude-code", "open-webui"])
def test_a_shell_reads_the_variables(client):
    script = printed(client) + "env"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"], "NINFER_API_KEY": "a b"}
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    wanted = settings_for(client, URL, "my model", 262_144).environment
    assert {name: found[name] for name in wanted} == {name: "a b" if "$" in value else value for name, value in wanted.items()}
    assert any(value.startswith(URL) for value in wanted.values())


def test_codex_reads_its_file():
    head, _, text = printed("codex", "--context", "9000").partition("# ~/.codex/config.toml\n")
    found = tomllib.loads(text)
    assert "NINFER_API_KEY" in head and found["model"] == "my model" and found["model_context_window"] == 9000
    provider = found["model_providers"][found["model_provider"]]
    assert (provider["base_url"], provider["wire_api"], provider["env_key"]) == (f"{URL}/v1", "responses", "NINFER_API_KEY")


def test_opencode_reads_its_file():
    found = json.loads(printed("opencode").partition("opencode.json\n")[2])
    provider, _, model = found["model"].partition("/")
    assert found["provider"][provider]["options"]["baseURL"] == f"{URL}/v1" and model in found["provider"][provider]["models"]


def test_every_client_is_in_the_document():
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text("utf-8")
    assert all(f"`{client}`" in text for client in CLIENTS)


@pytest.mark.parametrize(
    ("arguments", "said"), [(["netscape"], "'netscape' is not known"), (["codex", "--url", "x"], "--url is 'x'")]
)
def test_a_mistake_is_one_line(arguments, said):
    done = CliRunner().invoke(app, ["launch", *arguments], prog_name="ninfer-jax")
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1
