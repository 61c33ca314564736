"""`/v1/chat/completions` in the process, with a script for a model."""

from __future__ import annotations

import json

import pytest

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    "Look it up.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>"
)


def chunks_of(response) -> list[dict]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict], key: str) -> str:
    return "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks if c["choices"])


def test_an_answer_has_its_reasoning_apart_and_its_tokens_counted(make):
    client, engine, _ = make()
    body = client.post("/v1/chat/completions", json=ASK).json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there!", "reasoning_content": "I am thinking."}
    assert choice["finish_reason"] == "stop"
    tokens = engine.text.tokenizer.encode("I am thinking.\n</think>", allow_special=True)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens)
    assert body["usage"]["prompt_tokens"] == len(engine.submitted[0]["ids"])
    assert not engine.active


@pytest.mark.parametrize("rounds", [1, 3, 64])
def test_a_streamed_answer_is_the_same_as_a_whole_one(make, rounds):
    client, _, _ = make(CALL, round=rounds)
    request = ASK | {"tools": [TOOL]}
    whole = client.post("/v1/chat/completions", json=request).json()["choices"][0]
    chunks = chunks_of(
        client.post("/v1/chat/completions", json=request | {"stream": True, "stream_options": {"include_usage": True}})
    )
    message = whole["message"]
    assert joined(chunks, "content") == message["content"] == "Let me see."
    assert joined(chunks, "reasoning_content") == message["reasoning_content"] == "Look it up."
    pieces = [call for c in chunks if c["choices"] for call in c["choices"][0]["delta"].get("tool_calls", [])]
    assert [piece["function"]["name"] for piece in pieces if "id" in piece] == ["weather"]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(arguments) == json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "days": 3}
    assert whole["finish_reason"] == chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


def test_several_choices_are_drawn_with_different_seeds(make):
    client, engine, _ = make()
    body = client.post("/v1/chat/completions", json=ASK | {"n": 3, "seed": 7}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [one["params"].seed for one in engine.submitted] == [7, 8, 9]
    streamed = chunks_of(client.post("/v1/chat/completions", json=ASK | {"n": 2, "stream": True}))
    for index in range(2):
        mine = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content") or "" for c in mine) == "Hello there!"
        assert mine[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_its_logprob(make, stream):
    client, engine, _ = make()
    response = client.post("/v1/chat/completions", json=ASK | {"logprobs": True, "top_logprobs": 2, "stream": stream})
    if stream:
        entries = [e for c in chunks_of(response) for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [bytes(e["bytes"]) for e in entries] == [
        engine.text.tokenizer.token_bytes(t)
        for t in engine.text.tokenizer.encode("I am thinking.\n</think>\n\nHello there!<|im_end|>", allow_special=True)
    ]
    assert all(len(e["top_logprobs"]) == 2 for e in entries)


def test_a_budget_closes_the_reasoning_and_the_answer_goes_on(make):
    def script(prompt: str) -> str:
        return "The answer.<|im_end|>" if prompt.endswith("</think>\n\n") else "on and on " * 200

    client, engine, _ = make(script, round=1)
    body = client.post("/v1/chat/completions", json=ASK | {"thinking_budget": 10}).json()
    message = body["choices"][0]["message"]
    assert message["content"] == "The answer."
    assert message["reasoning_content"].startswith("on and on") and "Considering the limited time" in message["reasoning_content"]
    first, second = engine.submitted
    assert second["ids"][: len(first["ids"]) + 10][: len(first["ids"])] == first["ids"]
    assert body["usage"]["prompt_tokens"] == len(first["ids"])


def test_a_turn_that_ends_inside_the_reasoning_still_gets_an_answer(make):
    client, _, service = make(lambda prompt: "Done.<|im_end|>" if prompt.endswith("</think>\n\n") else "Hm.<|im_end|>")
    message = client.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Done.")
    assert b'ninfer_reasoning_closed_total{cause="end_of_turn"} 1.0' in service.metrics.text()


def test_a_cut_in_the_reasoning_is_length_and_no_content(make):
    client, _, _ = make("so much to say " * 50)
    choice = client.post("/v1/chat/completions", json=ASK | {"max_tokens": 5}).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == "" and choice["message"]["reasoning_content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_required_call_is_opened_for_the_model(make, choice, thinking):
    rest = "<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>"

    def script(prompt: str) -> str:
        return rest if prompt.endswith("<function=weather>\n") else "Hm.\n</think>\n\nI would rather talk.<|im_end|>"

    client, _, _ = make(script)
    body = client.post(
        "/v1/chat/completions", json=ASK | {"tools": [TOOL], "tool_choice": choice, "enable_thinking": thinking}
    ).json()
    message = body["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert body["choices"][0]["finish_reason"] == "tool_calls" and message["content"] is None
    assert message.get("reasoning_content") == ("Hm." if thinking else None)


def test_one_call_at_a_time_where_that_is_asked_for(make):
    call = CALL.removesuffix("<|im_end|>").partition("<tool_call>")[2]
    client, _, _ = make(f"</think>\n\n<tool_call>{call}\n<tool_call>{call}<|im_end|>")
    both = client.post("/v1/chat/completions", json=ASK | {"tools": [TOOL]}).json()["choices"][0]
    one = client.post("/v1/chat/completions", json=ASK | {"tools": [TOOL], "parallel_tool_calls": False}).json()["choices"][0]
    assert len(both["message"]["tool_calls"]) == 2 and len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


def test_silence_is_filled_with_comments(make):
    client, _, _ = make(prefill_s=0.2, settings={"heartbeat": 0.05})
    text = client.post("/v1/chat/completions", json=ASK | {"stream": True}).text
    assert text.count(": keep-alive") >= 2


def test_what_clients_say_about_a_conversation_becomes_its_session(make):
    client, engine, _ = make()
    for headers, extra in (
        ({}, {}),
        ({"session_id": "a"}, {}),
        ({"x-claude-code-session-id": "a"}, {}),
        ({}, {"prompt_cache_key": "a"}),
    ):
        client.post("/v1/chat/completions", json=ASK | extra, headers=headers)
    sessions = [one["session"] for one in engine.submitted]
    assert sessions[0] is None and sessions[1] == sessions[2] == sessions[3] != "a"


def test_marks_of_the_client_become_lengths_of_the_prompt(make):
    client, engine, _ = make()
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
    client.post("/v1/chat/completions", json={"messages": [system, *ASK["messages"]]})
    (one,) = engine.submitted
    (length,) = one["snapshots"]
    assert engine.text.tokenizer.decode(one["ids"][:length], skip_special=False).endswith("Be brief.<|im_end|>\n")


def test_results_are_rendered_in_the_order_of_their_calls(make):
    client, engine, _ = make()
    calls = [{"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "ba"]
    messages = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    prompt = engine.submitted[0]["prompt"]
    assert 0 < prompt.index("of a") < prompt.index("of b")
    doubled = client.post("/v1/chat/completions", json={"messages": [*messages, results[0]]})
    assert doubled.status_code == 400 and "messages[4].tool_call_id" in doubled.json()["error"]["message"]


def test_what_the_server_writes_does_not_go_past_the_limit(make):
    client, _, _ = make(lambda prompt: "The answer.<|im_end|>" if prompt.endswith("</think>\n\n") else "on and on " * 200, round=1)
    for limit, finish in ((30, "length"), (200, "stop")):
        body = client.post("/v1/chat/completions", json=ASK | {"thinking_budget": 10, "max_tokens": limit}).json()
        assert body["choices"][0]["finish_reason"] == finish and body["usage"]["completion_tokens"] <= limit
        assert body["choices"][0]["message"]["reasoning_content"].startswith("on and on")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def test_a_format_becomes_the_engines_grammar(make):
    client, engine, _ = make('Hm.\n</think>\n\n{"a": 1}<|im_end|>')
    message = client.post("/v1/chat/completions", json=ASK | {"response_format": JSON_FORMAT}).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and json.loads(engine.submitted[0]["params"].grammar.source)["required"] == ["a"]
    client.post("/v1/chat/completions", json=ASK | {"response_format": {"type": "text"}})
    assert engine.submitted[1]["params"].grammar is None


def test_a_strict_tool_becomes_the_engines_grammar_and_no_prefix(make):
    client, engine, _ = make(CALL)
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    for tools, choice in (([strict], "auto"), ([strict], "required"), ([TOOL], "auto"), ([strict], "none")):
        body = client.post("/v1/chat/completions", json=ASK | {"tools": tools, "tool_choice": choice}).json()
        assert body["choices"][0]["finish_reason"] == ("stop" if choice == "none" else "tool_calls")
    assert [one["params"].grammar is not None for one in engine.submitted] == [True, True, False, False]


def test_after_its_reasoning_is_closed_an_answer_begins_its_grammar(make):
    client, engine, _ = make(lambda p: '{"a": 2}<|im_end|>' if p.endswith("</think>\n\n") else "on and on " * 200, round=1)
    body = client.post("/v1/chat/completions", json=ASK | {"response_format": JSON_FORMAT, "thinking_budget": 9}).json()
    assert body["choices"][0]["message"]["content"] == '{"a": 2}'
    assert len(engine.submitted) == 2 and engine.submitted[0]["params"].grammar == engine.submitted[1]["params"].grammar


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "regex", "pattern": "("}}, "response_format.pattern"),
        ({"response_format": JSON_FORMAT, "tools": [TOOL]}, "response_format: not together with tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"<": {}}}}}]},
            "tools",
        ),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(make, change, said):
    client, engine, _ = make()
    answer = client.post("/v1/chat/completions", json=ASK | change)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert not engine.active
