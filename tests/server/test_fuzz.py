"""Bodies that the OpenAPI document allows, bodies that it does not, and damaged ones: none is a fault of the server's."""

from __future__ import annotations

import copy
import json
import random
import string

import pytest
import schemathesis
from schemathesis.specs.openapi import checks as openapi_checks
from server.conftest import on_a_port
from server.scripted import Scripted
from starlette.testclient import TestClient

from ninfer_jax.server import Service, Settings, build_app
from ninfer_jax.server.openapi import document

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Hi <|im_end|> ok"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "n": 2,
    "stop": ["x"],
    "logit_bias": {"5": 1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "reasoning": {"effort": "low", "max_tokens": 5},
    "chat_template_kwargs": {"enable_thinking": True},
    "prompt_cache_key": "k",
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["x", "y"], "max_tokens": 3, "echo": True, "stop": "q", "seed": 3, "n": 1, "stream": False},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "encrypted_content": "ninfer1.eJwDAAAAAAE=",
            },
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}}, {"type": "web_search"}],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 9,
        "store": False,
        "stream": False,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "So."},
                    {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"}]}],
            },
        ],
        "tools": [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "stream": False,
    },
    "/tokenize": {"messages": CHAT["messages"], "tools": [TOOL], "add_generation_prompt": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
BODIES["/v1/messages/count_tokens"] = {
    k: v for k, v in BODIES["/v1/messages"].items() if k not in ("max_tokens", "stop_sequences", "metadata", "stream")
}
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320, "", "x", "\x00", "é\u0301",
    "null", "<|im_end|>", "<think>", "</think>", "</tool_call>", "{{ 7*7 }}", "\ud800", "a" * 3000, [], {}, [[]], [None], {"": ""},
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, [{"type": "text", "text": 5}],
    {"$ref": "#"}, {"type": ["string"]}, {"allOf": [{"$ref": "#/x"}]}, ["auto"], [[1, "x"]], {"role": "user"},
]  # fmt: skip


SAID = (
    "Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call><|im_end|>"
)


@pytest.fixture(scope="module")
def engine() -> Scripted:
    """It says a call, whatever is asked."""
    return Scripted(lambda _: SAID, round=64)


@pytest.fixture(scope="module")
def service(engine) -> Service:
    return Service(Settings("tiny", max_body=1 << 20), engine)


@pytest.fixture(scope="module")
def client(service):
    with TestClient(build_app(service), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def address(service):
    with on_a_port(service) as address:
        yield address


schema = schemathesis.openapi.from_dict(document())
schema.config.generation.update(max_examples=8)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@schema.parametrize()
def test_what_the_document_describes_is_no_fault(case, address, engine):
    case.call_and_validate(base_url=address, checks=CHECKS)
    assert not engine.active


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def mutated(rng: random.Random, body: dict) -> bytes:
    """The body with one to three changes: a value replaced, dropped, wrapped or misnamed; or its bytes damaged."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([place for place in places(body) if place] or [()])
        if not path:
            break
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        key, change = path[-1], rng.randrange(6)
        if change < 3:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif change == 3:
            del holder[key]
        elif change == 4:
            holder[key] = [holder[key]] * rng.randint(1, 3)
        elif isinstance(holder, dict):
            holder["".join(rng.choices(string.ascii_lowercase + "._[]", k=5))] = holder.pop(key)
    data = json.dumps(body).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randint(0, 3)) + data[at + rng.randint(0, 3) :]
    return data


def send_mutated(client, engine, number: int, seed: int) -> dict[int, int]:
    rng, seen = random.Random(seed), {}
    for _ in range(number):
        path = rng.choice(list(BODIES))
        data = mutated(rng, BODIES[path])
        response = client.post(path, content=data)
        status = response.status_code
        seen[status] = seen.get(status, 0) + 1
        assert status < 500, (path, data, response.text)
        if status >= 400:
            error = response.json()["error"]
            assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"], (path, data)
        assert not engine.active, (path, data)
    return seen


def test_damaged_bodies_are_refused_or_answered(client, engine):
    for path, body in BODIES.items():
        assert client.post(path, json=body).status_code == 200, client.post(path, json=body).text
    seen = send_mutated(client, engine, 400, seed=1)
    assert seen[200] > 20 and seen[400] > 100


@pytest.mark.full
def test_a_hundred_thousand_damaged_bodies(client, engine):
    send_mutated(client, engine, 100_000, seed=2)
