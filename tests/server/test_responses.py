"""`/v1/responses` in the process, with a script for a model: the events as Codex reads them."""

from __future__ import annotations

import json

import httpx
import pytest
from server.conftest import on_a_port

ASK = {"model": "tiny", "input": "Hi"}
TOOL = {
    "type": "function",
    "name": "shell",
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
ANSWER = (
    'Look it up.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=shell>\n<parameter=command>\n["ls"]\n</parameter>\n'
    "</function>\n</tool_call><|im_end|>"
)


def events_of(response) -> list[dict]:
    found = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(value):
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "item_id")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("rounds", [1, 5, 64])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_items_are_added_before_their_deltas_and_done_whole(make, rounds, summary):
    client, engine, _ = make(ANSWER, round=rounds, cached=3)
    request = ASK | {"tools": [TOOL], "reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"], "store": False}
    whole = client.post("/v1/responses", json=request).json()
    events = events_of(client.post("/v1/responses", json=request | {"stream": True}))
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    done, open_, deltas = [], None, ""
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_ is None and event["output_index"] == len(done)
            open_, deltas = event["item"], ""
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == open_["id"]
            deltas += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == open_["id"] and event["item"]["status"] == "completed"
            done.append(event["item"])
            open_ = None
            assert deltas in json.dumps(event["item"]) or deltas == event["item"]["arguments"]
    assert done == events[-1]["response"]["output"]
    assert without_ids(done) == without_ids(whole["output"])
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert json.loads(done[2]["arguments"]) == {"command": ["ls"]}
    usage = events[-1]["response"]["usage"]
    assert usage == whole["usage"] and usage["input_tokens"] == len(engine.submitted[0]["ids"])
    assert usage["input_tokens_details"]["cached_tokens"] == 3 and usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert bool(done[0]["summary"]) is (summary is not None) and bool(done[0].get("content")) is (summary is None)


def test_items_come_back_as_the_turn_they_were(make):
    client, engine, _ = make(ANSWER)
    request = ASK | {
        "tools": [TOOL],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "instructions": "Be brief.",
    }
    output = client.post("/v1/responses", json=request).json()["output"]
    del output[0]["summary"]  # the blob alone
    turns = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "In a sandbox."}]},
        {"role": "user", "content": "Hi"},
        *output,
        {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "file.txt"},
    ]
    assert client.post("/v1/responses", json=request | {"input": turns}).status_code == 200
    prompt = engine.submitted[1]["prompt"]
    order = [
        "Be brief.",
        "In a sandbox.",
        "Hi",
        "Look it up.",
        "Let me see.",
        '<function=shell>\n<parameter=command>\n["ls"]',
        "file.txt",
    ]
    assert [prompt.index(text) for text in order] == sorted(prompt.index(text) for text in order)
    assert prompt.count("<|im_start|>assistant") == 2


def test_tools_of_other_kinds_are_left_out_and_named(make):
    client, engine, _ = make(ANSWER)
    response = client.post(
        "/v1/responses", json=ASK | {"tools": [TOOL, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]}
    )
    assert response.headers["x-ninfer-skipped-tools"] == "web_search, custom"
    assert "shell" in engine.submitted[0]["prompt"] and "apply_patch" not in engine.submitted[0]["prompt"]


@pytest.mark.parametrize("kind", ["\u00e9\u0301", "a\r\nset-cookie: b", "", "x" * 65])
def test_a_type_of_tools_that_no_header_could_name_is_refused(make, kind):
    client, engine, _ = make(ANSWER)
    refused = client.post("/v1/responses", json=ASK | {"tools": [{"type": kind}]})
    assert refused.status_code == 400 and "tools[0].type: " in refused.json()["error"]["message"] and not engine.submitted


def test_a_cut_answer_is_incomplete(make):
    client, _, _ = make("so much to say " * 50)
    body = client.post("/v1/responses", json=ASK | {"max_output_tokens": 5}).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    last = events_of(client.post("/v1/responses", json=ASK | {"max_output_tokens": 5, "stream": True}))[-1]
    assert last["type"] == "response.incomplete"


def test_signs_of_life_are_events_that_codex_counts(make):
    """The engine says nothing until three of them have been read behind the first, which begins every answer."""
    _, engine, service = make(ANSWER, silent=True, settings={"heartbeat": 0.01})
    kinds = []
    with on_a_port(service) as address, httpx.stream("POST", f"{address}/v1/responses", json=ASK | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                kinds.append(json.loads(line[6:])["type"])
                engine.silent = kinds.count("response.in_progress") < 4
    assert kinds[:5] == ["response.created"] + ["response.in_progress"] * 4 and kinds[-1] == "response.completed"


def test_a_failure_has_a_code(make):
    client, engine, _ = make()
    engine.fault = RuntimeError("secret")
    last = events_of(client.post("/v1/responses", json=ASK | {"stream": True}))[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error" and "secret" not in str(last)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": []}, "messages: empty"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type: 'input_image'",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0].type: 'computer_call'"),
        ({"input": [{"type": "function_call", "name": "shell"}]}, "input[0]: a function_call needs a call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server has no such field"),
        ({"background": True}, "background"),
        ({"top_logprobs": 2}, "top_logprobs: not supported"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"name": "x"}]}, "tools[0].type: missing"),
    ],
)
def test_one_line_names_the_field(make, change, said):
    client, _, _ = make()
    response = client.post("/v1/responses", json=ASK | change)
    assert response.status_code == 400 and said in response.json()["error"]["message"]
