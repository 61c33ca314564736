"""`ninfer-jax generate` as a process: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.cli.main import app
from ninfer_jax.engine.prefix_settings import open_prefixes
from ninfer_jax.engine.prefixes import NoPrefixes
from ninfer_jax.models import checked
from ninfer_jax.text import NoTokenizer

TEXT = "ROMEO.\nWhat lady is that, "
# Shapes of the standard engines: with a compilation cache, nothing is compiled twice.
COMMON = ("--context", "512", "--prefill-chunk", "64", "--kv", "f32", "--max-new", "24")


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; it must succeed."""
    command = [sys.executable, "-m", "ninfer_jax.cli.main", "generate", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_stdout_is_the_answer(plain_engine):
    expected = plain_engine.generate(TEXT, SamplingParams(temperature=0, max_new_tokens=24))
    done = run("tiny", "--prompt", TEXT, "--greedy", *COMMON)
    assert done.stdout == expected.text + "\n"
    chosen, header, statistics = done.stderr.splitlines()
    assert chosen.startswith("auto: ")  # slots and drafts are left open
    assert header.startswith(f"tiny on {plain_engine.device} ") and "context 512, kv f32, draft 3, slots 1" in header
    assert f"{expected.prompt_tokens} prompt tokens in " in statistics
    assert f"{len(expected.tokens)} tokens in " in statistics and f"finish {expected.finish_reason}" in statistics


def test_json_from_stdin_with_drafts(plain_engine):
    params = plain_engine.default_params(max_new_tokens=24, seed=5, temperature=1.1, top_k=50, top_p=0.9, min_p=0.01)
    expected = plain_engine.generate(TEXT, params)
    flags = ("--seed", "5", "--temperature", "1.1", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01")
    done = run("tiny", "-", "--json", "--draft", "3", "--slots", "2", *flags, *COMMON, stdin=TEXT)
    assert len(done.stdout.splitlines()) == 1
    answer = json.loads(done.stdout)
    stats = answer.pop("stats")
    assert answer.pop("chosen") == ["pool"] and answer.pop("why")  # all else is set
    assert answer.pop("configuration")["draft"] == 3
    assert answer == {
        "tokens": expected.tokens,
        "text": expected.text,
        "reasoning": expected.reasoning,
        "device": plain_engine.device,
        "finish_reason": expected.finish_reason,
        "prompt_tokens": expected.prompt_tokens,
    }
    seconds = {"queue_s", "prefill_s", "first_token_s", "decode_s"}
    assert set(stats) == seconds | {"cached_tokens", "rounds", "drafted", "accepted", "compilations", "kv_bytes_per_token"}
    assert stats["drafted"] == 3 * stats["rounds"] > 0
    assert stats["compilations"] > 0 and stats["kv_bytes_per_token"] == plain_engine.kv_bytes_per_token


@pytest.fixture
def invoke(monkeypatch, plain_engine, tmp_path):
    """Runs the command in this process with the engine loaded already; returns (stdout, stderr)."""
    asked = {}

    def load(path, config, *, programs, verify, recipe, before, progress, say):
        asked.update(path=path, config=config, programs=programs, verify=verify)
        progress("weights", 1, 1)
        progress("programs", 1, 1)
        return plain_engine

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()  # what the tests call their model

    def call(*arguments: str, stdin: bytes | None = None) -> tuple[str, str]:
        result = CliRunner().invoke(app, ["generate", *arguments], input=stdin)
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    call.asked = asked
    return call


def test_tokens_go_in_and_out(invoke, plain_engine, monkeypatch):
    ids = plain_engine.tokenizer.encode(TEXT)
    expected = plain_engine.generate(ids, SamplingParams(temperature=0, max_new_tokens=24))
    asked = ("m", "--tokens", ",".join(map(str, ids)), "--greedy", "--max-new", "24")
    assert invoke(*asked)[0] == expected.text + "\n" and invoke.asked["config"].tokenizer == "auto"
    assert json.loads(invoke(*asked, "--json")[0])["tokens"] == expected.tokens
    # Without a tokenizer the answer is ids, in the form that --tokens takes.
    monkeypatch.setattr(plain_engine, "tokenizer", NoTokenizer(plain_engine.model_config.vocab_size))
    stdout, _ = invoke(*asked, "--no-tokenizer")
    assert stdout == ",".join(map(str, expected.tokens)) + "\n" and invoke.asked["config"].tokenizer is None
    answer = json.loads(invoke(*asked, "--no-tokenizer", "--json")[0])
    assert answer["tokens"] == expected.tokens and answer["text"] == answer["reasoning"] == ""


def test_notes_come_before_the_answer(invoke, plain_engine, monkeypatch):
    assert plain_engine.notes == ()
    monkeypatch.setattr(Engine, "notes", ("max_length=3 is not used",))
    _, stderr = invoke("m", "--prompt", TEXT, "--max-new", "1")
    assert stderr.splitlines()[0] == "note: max_length=3 is not used"


def test_messages_with_a_byte_order_mark(invoke, tmp_path):
    file, counts = tmp_path / "m.json", []
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + b'[{"role": "user", "content": "Hi"}]')
        counts.append(json.loads(invoke("m", "--messages", str(file), "--max-new", "1", "--json")[0])["prompt_tokens"])
        counts.append(json.loads(invoke("m", "-", "--max-new", "1", "--json", stdin=mark + b"Hello")[0])["prompt_tokens"])
    assert counts[:2] == counts[2:]


def test_the_model_argument(invoke, tmp_path, monkeypatch):
    invoke("tiny", "--prompt", TEXT, "--max-new", "1")
    assert invoke.asked["path"] == "tiny" and checked("tiny").path == tiny_path()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a directory of that name is what the user means
    invoke("tiny", "--prompt", TEXT, "--max-new", "1")
    assert invoke.asked["path"] == "tiny" and checked("tiny").path == Path("tiny")


def test_options_reach_the_configuration(invoke):
    invoke(
        "m",
        "--prompt",
        "x",
        "--max-new",
        "1",
        "--context",
        "300",
        "--kv",
        "rk4v4",
        "--draft",
        "4",
        "--slots",
        "3",
        "--dtype",
        "bfloat16",
        "--kernels",
        "xla",
    )
    config = invoke.asked["config"]
    assert invoke.asked["verify"] and config.prefix_cache == "auto" and config.cache_dir is None
    assert (config.context, config.kv, config.draft, config.slots, config.dtype) == (300, "rk4v4", 4, 3, "bfloat16")
    assert config.kernels == "xla"


@pytest.fixture
def another_process(plain_engine, monkeypatch):
    """Gives the engine an empty cache, as a process has that begins."""

    def begin():
        config = EngineConfig(prefix_cache="exact", cache_bytes=1 << 25)
        prefixes = open_prefixes(plain_engine.runner.pool, config, "exact", 1 << 25, lambda: {"weights": "w"})
        monkeypatch.setattr(plain_engine.runner, "prefixes", prefixes)

    return begin


@pytest.mark.parametrize("kind", ["--prompt", "--messages"])
def test_a_session_goes_on_tomorrow_without_prefill(kind, invoke, plain_engine, another_process, tmp_path):
    """Up to the last multiple of the chunk; the answer is the one to the whole conversation."""
    files = []
    for text in (TEXT * 8, "And then?"):
        (file := tmp_path / f"{len(files)}.json").write_text(json.dumps([{"role": "user", "content": text}]))
        files.append(str(file) if kind == "--messages" else text)
    asked = ("m", "--session", "talk", "--greedy", "--max-new", "70", "--json")
    another_process()
    first = json.loads(invoke(*asked, kind, files[0])[0])
    assert invoke.asked["config"].prefix_cache == "exact" and first["stats"]["cached_tokens"] == 0
    another_process()
    second = json.loads(invoke(*asked, kind, files[1])[0])
    known = first["prompt_tokens"] + (len(first["tokens"]) if kind == "--prompt" else 0)
    assert second["stats"]["cached_tokens"] >= known // 64 * 64 >= 64
    plain_engine.runner.prefixes = NoPrefixes()
    if kind == "--prompt":
        whole = plain_engine.prompt_ids(files[0]) + first["tokens"] + plain_engine.prompt_ids(files[1])
    else:
        said = {"role": "assistant", "content": first["text"], "reasoning_content": first["reasoning"]}
        whole = [{"role": "user", "content": TEXT * 8}, said, {"role": "user", "content": "And then?"}]
    cold = plain_engine.generate(whole, SamplingParams(temperature=0, max_new_tokens=70))
    assert second["prompt_tokens"] == cold.prompt_tokens and not cold.stats.cached_tokens
    assert second["tokens"] == cold.tokens
    other = ("--prompt", "x") if kind == "--messages" else ("--messages", str(tmp_path / "0.json"))
    another_process()
    refused = CliRunner().invoke(app, ["generate", "m", "--session", "talk", *other])
    assert refused.exit_code == 1 and "--session talk holds " in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_stop_strings(invoke, plain_engine):
    free = plain_engine.generate(TEXT, SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)).text
    stop = free[5:8]
    stdout, stderr = invoke("tiny", "--prompt", TEXT, "--greedy", "--max-new", "24", "--stop", "never here", "--stop", stop)
    assert stdout == free[: free.index(stop)] + "\n"
    assert "finish stop" in stderr


def test_messages_with_and_without_thinking(invoke, plain_engine, tmp_path):
    messages = [{"role": "user", "content": "Who are you? é"}]
    file = tmp_path / "m.json"
    file.write_text(json.dumps(messages, ensure_ascii=False), "utf-8")
    params = SamplingParams(temperature=0, max_new_tokens=60)
    thinking = plain_engine.generate(messages, params)
    stdout, stderr = invoke("tiny", "--messages", str(file), "--greedy", "--max-new", "60")
    assert stdout == thinking.text + "\n"
    assert thinking.reasoning in stderr
    direct = plain_engine.generate(messages, params, enable_thinking=False)
    answer = json.loads(invoke("tiny", "--messages", str(file), "--greedy", "--max-new", "60", "--no-thinking", "--json")[0])
    assert (answer["text"], answer["reasoning"]) == (direct.text, "")
    assert answer["prompt_tokens"] == direct.prompt_tokens > thinking.prompt_tokens


def test_stdin_is_taken_as_it_is(invoke, plain_engine):
    raw = "Señor\r\n\nENTER"
    stdout, _ = invoke("tiny", "-", "--max-new", "1", "--json", stdin=raw.encode())
    assert json.loads(stdout)["prompt_tokens"] == len(plain_engine.tokenizer.encode(raw))


def test_help_names_every_option():
    result = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in (
        "--prompt",
        "--messages",
        "--greedy",
        "--draft",
        "--kv",
        "--context",
        "--stop",
        "--json",
        "--no-thinking",
        "--no-verify",
        "--tokens",
        "--no-tokenizer",
    ):
        assert option in result.stdout
