"""`ninfer-jax serve tiny`, one process for the file, driven by the real SDKs; the last test ends it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest
from processes import FUNCTIONAL
from typer.testing import CliRunner

from ninfer_jax.cli.main import app
from ninfer_jax.server import process

ROOT = Path(__file__).resolve().parents[2]
CONTEXT, SLOTS = 1024, 2
SHAPES = ["--context", str(CONTEXT), "--slots", str(SLOTS), "--draft", "3", "--kv", "f32", "--prefill-chunk", "64"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
HI: list = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.engine


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"serving_{name}", ROOT / f"examples/serving/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "ninfer_jax", "serve", "tiny", "--port", "0", "--max-body", "1", "--drain", "20", *SHAPES]
    environment = FUNCTIONAL | {"NINFER_API_KEY": "key", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(scope="module")
def address(child) -> str:
    """Once it is ready."""
    said = []
    for line in child.stderr:
        said.append(line)
        if line == "ready\n":
            return said[0].split()[2].rstrip(",")
    raise AssertionError("".join(said))


@pytest.fixture(scope="module")
def oa(address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def an(address) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def raw(address) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers={"x-api-key": "key"}, timeout=120) as client:
        yield client


def test_chat_streamed_is_chat_whole(oa):
    request: dict = dict(model="tiny", messages=HI, temperature=0, max_tokens=100, extra_body={"thinking_budget": 20})
    whole = oa.chat.completions.create(**request)
    message, usage = whole.choices[0].message, whole.usage
    assert whole.choices[0].finish_reason == "length" and usage.completion_tokens == 100 and message.content
    assert message.reasoning_content and usage.completion_tokens_details.reasoning_tokens > 20
    chunks = list(oa.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == usage.prompt_tokens


def test_a_seed_gives_the_same_draws_and_logprobs_are_of_the_tokens_drawn(oa):
    request: dict = dict(model="tiny", messages=HI, seed=5, temperature=1, max_tokens=20, logprobs=True, top_logprobs=3)
    one, other = (oa.chat.completions.create(**request).choices[0] for _ in range(2))
    assert one.message.reasoning_content == other.message.reasoning_content
    assert len(one.logprobs.content) == 20
    for entry in one.logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= entry.top_logprobs[0].logprob <= 0
    several = oa.chat.completions.create(**request | {"n": 3}).choices
    assert several[0].message.reasoning_content == one.message.reasoning_content
    assert len({choice.message.reasoning_content for choice in several}) == 3


def test_a_required_tool_is_called_in_every_api(oa, an):
    function = {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}
    named: dict = {"type": "function", "function": {"name": "weather"}}
    chat = oa.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=[{"type": "function", "function": function}],
        tool_choice=named,
        temperature=0,
        max_tokens=60,
        extra_body={"enable_thinking": False},
    )
    answer = oa.responses.create(
        model="tiny",
        input="Hi",
        tools=[{"type": "function", **function}],
        tool_choice={"type": "function", "name": "weather"},
        temperature=0,
        max_output_tokens=60,
        extra_body={"enable_thinking": False},
    )
    message = an.messages.create(
        model="tiny",
        messages=HI,
        tools=[{"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}],
        tool_choice={"type": "tool", "name": "weather"},
        max_tokens=60,
        extra_body={"temperature": 0},
    )
    arguments = [
        json.loads(chat.choices[0].message.tool_calls[0].function.arguments),
        json.loads(next(item for item in answer.output if item.type == "function_call").arguments),
        next(block for block in message.content if block.type == "tool_use").input,
    ]
    assert arguments[0] == arguments[1] == arguments[2] and isinstance(arguments[0], dict)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "role": {"enum": ["king", "servant"]},
        "scenes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 5}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "role", "scenes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_follows_its_schema_in_every_api(oa, an, temperature):
    draw: dict = {"temperature": temperature, "seed": 3}
    thinking = {"thinking_budget": 10, "max_tokens": 400}
    format: dict = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA, "strict": True}}
    flat: dict = {"type": "json_schema", "name": "part", "schema": SCHEMA, "strict": True}
    chat = oa.chat.completions.create(model="tiny", messages=HI, response_format=format, **draw, extra_body=thinking)
    items = oa.responses.create(model="tiny", input="Hi", text={"format": flat}, extra_body=draw | {"thinking_budget": 0})
    output: dict = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = an.messages.create(model="tiny", max_tokens=400, messages=HI, output_config=output, extra_body=draw)
    raw = oa.completions.create(model="tiny", prompt="ROMEO.", max_tokens=400, **draw, extra_body={"response_format": format})
    for text in (chat.choices[0].message.content, items.output_text, message.content[-1].text, raw.choices[0].text):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert chat.choices[0].finish_reason == "stop" and chat.choices[0].message.reasoning_content
    with oa.chat.completions.stream(model="tiny", messages=HI, response_format=format, **draw, extra_body=thinking) as events:
        assert events.get_final_completion().choices[0].message.content == chat.choices[0].message.content


def test_the_sdk_parses_its_own_models(oa):
    class Part(pydantic.BaseModel):
        role: Literal["king", "servant"]
        scene: int = pydantic.Field(ge=1, le=5)

    parsed = oa.chat.completions.parse(
        model="tiny", messages=HI, response_format=Part, temperature=1, seed=1, extra_body={"enable_thinking": False}
    )
    assert isinstance(parsed.choices[0].message.parsed, Part)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_strict_tool_is_called_as_its_schema_says(oa, choice):
    parameters = SCHEMA | {"properties": {key: value for key, value in SCHEMA["properties"].items() if key != "name"}}
    parameters["required"] = ["role", "scenes"]
    tool: dict = {"type": "function", "function": {"name": "cast", "parameters": parameters, "strict": True}}
    request: dict = dict(model="tiny", messages=HI, tools=[tool], tool_choice=choice, temperature=1, max_tokens=300)
    for seed in range(3):
        answer = oa.chat.completions.create(**request, seed=seed, extra_body={"thinking_budget": 5}).choices[0]
        for call in answer.message.tool_calls or []:
            if answer.finish_reason == "tool_calls":
                jsonschema.validate(json.loads(call.function.arguments), parameters)
        assert choice == "auto" or answer.message.tool_calls


def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(oa):
    format: dict = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="response_format") as refused:
        oa.chat.completions.create(model="tiny", messages=HI, response_format=format)
    assert "strin" in refused.value.message and "\n" not in refused.value.message


def test_responses_streamed_are_responses_whole(oa):
    request: dict = dict(model="tiny", input="Hi", temperature=0, max_output_tokens=30, extra_body={"enable_thinking": False})
    whole = oa.responses.create(**request)
    assert whole.output_text
    events = list(oa.responses.create(**request, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == f"response.{whole.status}" and events[-1].response.usage == whole.usage


def test_messages_streamed_are_messages_whole(an):
    request: dict = dict(model="tiny", max_tokens=30, messages=HI, system="Be brief.", extra_body={"temperature": 0})
    whole = an.messages.create(**request)
    assert whole.usage.output_tokens <= 30 and whole.content[0].text
    with an.messages.stream(**request) as events:
        assert "".join(events.text_stream) == whole.content[0].text
    counted = an.messages.count_tokens(model="tiny", messages=HI, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_text_is_continued_and_stops_at_a_string(oa):
    plain = oa.completions.create(model="tiny", prompt="ROMEO.", temperature=0, max_tokens=40).choices[0].text
    word = plain.split()[4]
    stopped = oa.completions.create(model="tiny", prompt="ROMEO.", temperature=0, max_tokens=40, stop=word).choices[0]
    assert stopped.text == plain[: plain.index(word)] and stopped.finish_reason == "stop"
    assert oa.completions.create(model="tiny", prompt="ROMEO.", temperature=0).usage.completion_tokens == 16


def test_answers_side_by_side_are_the_answers_alone(oa):
    prompts = ["ROMEO.", "Enter the King", "def main():", "JULIET.\nO", "import os\n"]

    def ask(prompt: str) -> str:
        return oa.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=40).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    found: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i, p=p: found.__setitem__(i, ask(p))) for i, p in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(prompts))] == alone


def test_who_goes_away_leaves_the_slots_to_others(raw):
    long = {"prompt": "ROMEO.", "max_tokens": 900, "stream": True}
    for _ in range(SLOTS + 1):
        with raw.stream("POST", "/v1/completions", json=long) as answer:
            next(answer.iter_lines())
    reader = socket.create_connection((raw.base_url.host, raw.base_url.port))  # one that asks and never reads
    body = json.dumps(long)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: key\r\nContent-Length: {len(body)}\r\n\r\n"
    reader.sendall((head + body).encode())
    assert raw.post("/v1/completions", json=long | {"stream": False, "max_tokens": 5}).status_code == 200
    reader.close()
    for _ in range(200):
        status = raw.get("/api/status").json()
        if status["running"] == 0 and all(slot["state"] == "free" for slot in status["load"]["slots"]):
            break
        time.sleep(0.05)
    assert status["running"] == 0 and status["load"]["pages_used"] == 0, status["load"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"temperature": "hot"}, None, "temperature: input should be a valid number"),
        ({"logit_bias": {"9999": 1}}, None, "logit_bias names token 9999"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context_length_exceeded", f"{CONTEXT} tokens"),
        ({"colour": 1}, "unknown_parameter", "colour"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(oa, change, code, said):
    request: dict = {"model": "tiny", "messages": HI} | {k: v for k, v in change.items() if k in ("messages", "logit_bias")}
    rest = {k: v for k, v in change.items() if k not in request}
    with pytest.raises(openai.BadRequestError) as refused:
        oa.chat.completions.create(**request, extra_body=rest)
    assert refused.value.code == code and said in refused.value.message and "\n" not in refused.value.message
    if code == "context_length_exceeded":
        assert refused.value.body["n_prompt_tokens"] > 3000 and str(refused.value.body["n_prompt_tokens"]) in refused.value.message


def test_keys_and_sizes_are_checked_before_anything_else(address, raw):
    for wrong in ({}, {"x-api-key": "kez"}, {"authorization": "Bearer"}, {"authorization": "Basic key"}):
        assert httpx.post(f"{address}/v1/chat/completions", json={"messages": HI}, headers=wrong).status_code == 401
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).models.list()
    assert raw.post("/v1/chat/completions", content=b" " * (2 << 20)).status_code == 413
    assert raw.post("/v1/chat/completions", content=(b" " * 65536 for _ in range(32))).status_code == 413
    flood = {f"x-{i}": "y" * 100 for i in range(2000)}
    with contextlib.suppress(httpx.TransportError):  # closed while it was still sending
        assert httpx.get(f"{address}/health", headers=flood).status_code == 400
    assert raw.get("/health").json() == {"status": "ok"}


def test_the_rest_of_the_routes_answer(raw, oa):
    assert [model.id for model in oa.models.list()] == ["tiny"]
    (model,) = raw.get("/v1/models").json()["data"]
    assert model["max_model_len"] == CONTEXT and model["meta"]["slots"] == SLOTS
    ids = raw.post("/tokenize", json={"content": "Hello"}).json()["tokens"]
    assert raw.post("/detokenize", json={"tokens": ids}).json()["content"] == "Hello"
    assert raw.get("/openapi.json").json()["openapi"].startswith("3.1") and "<html" in raw.get("/").text
    metrics = raw.get("/metrics").text
    assert f"ninfer_slots {SLOTS}.0" in metrics and "ninfer_pages " in metrics
    status = raw.get("/api/status").json()
    assert status["memory"]["total"] > sum(status["memory"]["parts"].values()) > status["memory"]["parts"]["weights"] > 1e7
    assert status["totals"]["drafted"] > status["totals"]["accepted"] > 0


def test_a_conversation_that_goes_on_is_taken_from_the_cache(oa, an):
    first: list = [{"role": "user", "content": "Tell the story of the king and his servant from the very beginning. " * 8}]
    request: dict = dict(model="tiny", messages=first, temperature=0, max_tokens=20, extra_body={"enable_thinking": False})
    cold, warm = (oa.chat.completions.create(**request) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0 < warm.usage.prompt_tokens_details.cached_tokens
    assert warm.choices[0].message.content == cold.choices[0].message.content
    message = an.messages.create(model="tiny", max_tokens=20, messages=first, extra_body={"temperature": 0})
    assert message.usage.cache_read_input_tokens == warm.usage.prompt_tokens_details.cached_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == warm.usage.prompt_tokens
    assert message.content[0].text == cold.choices[0].message.content


def test_the_examples_run(address, child, monkeypatch, capsys):
    monkeypatch.setenv("NINFER_API_KEY", "key")
    example("openai_sdk").main(address, tokens=30)
    example("anthropic_sdk").main(address, tokens=30)
    said = capsys.readouterr().out
    assert "ROMEO. " in said and said.count("of the prompt cached]") == 2
    messages = example("agent").main("What is here?", address, turns=2, tokens=30)
    assert [message["role"] for message in messages[:2]] == ["user", "assistant"]
    command = ["load", "--url", address, "--pid", str(child.pid), "--requests", "40", "--clients", "4", "--distinct", "8"]
    monkeypatch.setattr(sys, "argv", command)
    assert example("load").main() == 0, capsys.readouterr().out


def test_a_signal_ends_it_with_the_running_answer_finished(child, raw):
    with raw.stream("POST", "/v1/completions", json={"prompt": "ROMEO.", "max_tokens": 300, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert child.wait(30) == 0
    said = child.stderr.read()
    assert "stopped" in said and "Traceback" not in said and "ROMEO" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--max-body", "0"], "--max-body is 0"),
        (["--drain", "-1"], "--drain is -1"),
        (["--queue", "-1"], "--queue is -1"),
        (["--slots", "9"], "slots is 9"),
        (["--prefix-cache", "no"], "prefix_cache is 'no', known are auto, exact, fast, off"),
        (["--cache-bytes", "0"], "cache_bytes is 0"),
        (["--prefix-cache", "off", "--cache-dir", "x"], "cache_dir is given, but prefix_cache is 'off'"),
        (["--api-key", ""], "--api-key: empty"),
        (["--api-key-file", "no/such/file"], "no/such/file"),
        (["--programs", "no/such/place"], "no/such/place"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(options, said):
    done = CliRunner().invoke(app, ["serve", "tiny", *options], prog_name="ninfer-jax")
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_one_line():
    with process.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "tiny", "--port", str(port)], prog_name="ninfer-jax")
    assert done.exit_code == 1 and f"port {port}: it is taken" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "prometheus_client"])
def test_without_the_extra_the_command_says_what_to_install(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(("ninfer_jax.server", f"{missing}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = CliRunner().invoke(app, ["serve", "tiny"], prog_name="ninfer-jax")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert missing in done.stderr and "pip install 'ninfer-jax[server]'" in done.stderr
