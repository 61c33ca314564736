"""`/v1/messages` in the process, with a script for a model."""

from __future__ import annotations

import json

import pytest

ASK = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ANSWER = (
    "Look it up.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def events_of(response) -> list[dict]:
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_without_thinking_the_answer_is_text_alone(make):
    client, engine, _ = make("Hello there!<|im_end|>")
    body = client.post("/v1/messages", json=ASK).json()
    assert body["content"] == [{"type": "text", "text": "Hello there!"}]
    assert (body["type"], body["role"], body["stop_reason"], body["stop_sequence"]) == ("message", "assistant", "end_turn", None)
    assert engine.submitted[0]["prompt"].endswith("</think>\n\n")


@pytest.mark.parametrize("rounds", [1, 5, 64])
def test_blocks_come_one_after_another_and_add_up_to_the_whole_answer(make, rounds):
    client, engine, _ = make(ANSWER, round=rounds, cached=5)
    request = ASK | THINK | {"tools": [TOOL]}
    whole = client.post("/v1/messages", json=request).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Paris"} and whole["stop_reason"] == "tool_use"
    events = events_of(client.post("/v1/messages", json=request | {"stream": True}))
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    blocks: list[dict] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            for key, value in event["delta"].items():
                if key != "type":
                    blocks[-1]["json" if key == "partial_json" else key] += value
        elif event["type"] == "content_block_stop":
            is_open = False
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert [{k: v for k, v in b.items() if k != "id"} for b in blocks] == [
        {k: v for k, v in b.items() if k != "id"} for b in whole["content"]
    ]
    usage = events[-2]["usage"]
    assert usage == whole["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == len(engine.submitted[0]["ids"])
        and usage["cache_read_input_tokens"] == 5
    )


def test_hidden_reasoning_comes_back_to_the_model(make):
    client, engine, _ = make(ANSWER)
    request = ASK | {"thinking": {"type": "adaptive", "display": "omitted"}, "tools": [TOOL]}
    content = client.post("/v1/messages", json=request).json()["content"]
    assert content[0]["thinking"] == ""
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": [{"type": "text", "text": "Rain."}]}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks"}]},
    ]
    assert client.post("/v1/messages", json=request | {"messages": turns}).status_code == 200
    prompt = engine.submitted[1]["prompt"]
    assert "Look it up." in prompt
    assert prompt.index("<function=weather>\n<parameter=city>") < prompt.index("Rain.") < prompt.index("Thanks")


def test_stop_sequences_are_named_and_not_looked_for_in_reasoning(make):
    client, _, _ = make("END is near.\n</think>\n\nOne END two<|im_end|>")
    body = client.post("/v1/messages", json=ASK | THINK | {"stop_sequences": ["END"]}).json()
    assert body["content"][0]["thinking"] == "END is near." and body["content"][1]["text"] == "One "
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_tokens_are_counted_as_the_request_has_them(make):
    client, engine, _ = make("Yes.<|im_end|>")
    request = ASK | {"system": "Be brief.", "tools": [TOOL]}
    counted = client.post("/v1/messages/count_tokens", json={k: v for k, v in request.items() if k != "max_tokens"})
    client.post("/v1/messages", json=request)
    assert counted.json() == {"input_tokens": len(engine.submitted[0]["ids"])}


def test_marks_in_system_text_and_messages_become_lengths(make):
    client, engine, _ = make("Yes.<|im_end|>")
    mark = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "One"} | mark]},
        {"role": "assistant", "content": "Two"},
        *ASK["messages"],
    ]
    client.post("/v1/messages", json=ASK | {"system": [{"type": "text", "text": "Be brief."} | mark], "messages": turns})
    (one,) = engine.submitted
    ends = [engine.text.tokenizer.decode(one["ids"][:n], skip_special=False) for n in one["snapshots"]]
    assert [end.endswith(text) for end, text in zip(ends, ["Be brief.<|im_end|>\n", "One<|im_end|>\n"], strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_a_number_that_changes_with_every_request_does_not_change_the_prompt(make, keep):
    client, engine, _ = make("Yes.<|im_end|>", settings={"keep_nonces": keep})
    for number in range(2):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch=0{number};"}
        client.post("/v1/messages", json=ASK | {"system": [line, {"type": "text", "text": "You are Claude Code."}]})
    first, second = (one["prompt"] for one in engine.submitted)
    assert (first == second) is not keep and "You are Claude Code." in first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages: empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type: 'image'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages[1]: the last message"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "none such"}, "tools": [TOOL]}, "tool_choice: there is no tool"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"container": "x"}, "container: this server has no such field"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_one_line_in_that_apis_shape_names_the_field(make, change, said):
    client, _, _ = make()
    response = client.post("/v1/messages", json=ASK | change)
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and said in body["error"]["message"]


def test_a_fault_in_a_stream_is_an_error_event(make):
    client, engine, _ = make()
    engine.fault = RuntimeError("secret")
    events = events_of(client.post("/v1/messages", json=ASK | {"stream": True}))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error" and "secret" not in str(events)


def test_a_long_prefill_is_pinged(make):
    client, _, _ = make("Yes.<|im_end|>", prefill_s=0.2, settings={"heartbeat": 0.05})
    kinds = [event["type"] for event in events_of(client.post("/v1/messages", json=ASK | {"stream": True}))]
    assert kinds[0] == "message_start" and kinds.count("ping") >= 2
