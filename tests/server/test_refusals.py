"""What is refused, with which status, and which field it names; the server goes on."""

from __future__ import annotations

import pytest

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"messages": [], "messages": []}', "twice"),
        ('{"messages": ' + "[" * 5000 + "]" * 5000 + "}", "nested deeper than 100"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (ASK | {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content: character 0 is a lone surrogate"),
        ({"model": "tiny"}, "messages: missing"),
        (ASK | {"messages": []}, "messages: empty"),
        (ASK | {"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        (ASK | {"messages": [ASK["messages"][0], {"role": "user", "content": None}]}, "messages[1].content"),
        (ASK | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type: 'image_url'"),
        (ASK | {"messages": [{"role": "system", "content": "only"}]}, "messages: only system text"),
        (ASK | {"temperature": "hot"}, "temperature: input should be a valid number, not 'hot'"),
        (ASK | {"temperature": 101}, "temperature is 101"),
        (ASK | {"temperature": -0.1}, "temperature is -0.1"),
        (ASK | {"top_p": 1.5}, "top_p is 1.5"),
        (ASK | {"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        (ASK | {"n": 0}, "n: "),
        (ASK | {"stop": [""]}, "stop is"),
        (ASK | {"stop": ["x"] * 17}, "stop: 17"),
        (ASK | {"logit_bias": {"x": 1}}, "logit_bias: 'x'"),
        (ASK | {"logit_bias": {"9999": 1}}, "logit_bias names token 9999"),
        (ASK | {"colour": 1}, "colour: this server has no such field"),
        (ASK | {"stream_options": {"x": 1}}, "stream_options.x: this server has no such field"),
        (ASK | {"tools": [{"type": "web_search"}]}, "tools[0].type: 'web_search'"),
        (ASK | {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (ASK | {"tool_choice": "required"}, "tool_choice: a call is required"),
        (ASK | {"chat_template_kwargs": {"mood": 1}}, "mood: this chat template has no such option"),
        (ASK | {"reasoning_effort": "none", "enable_thinking": True}, "enable_thinking: given twice"),
        (ASK | {"top_logprobs": 3}, "top_logprobs: needs logprobs"),
    ],
)  # fmt: skip
def test_one_line_names_the_field(make, body, said):
    client, engine, _ = make()
    raw = {"content": body} if isinstance(body, str | bytes) else {"content": __import__("json").dumps(body)}
    response = client.post(CHAT, **raw)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert said in error["message"] and "\n" not in error["message"] and error["type"] == "invalid_request_error"
    assert not engine.active
    assert client.post(CHAT, json=ASK).status_code == 200


def test_unknown_fields_are_left_out_where_that_is_asked_for(make):
    client, _, _ = make(settings={"lenient": True})
    assert client.post(CHAT, json=ASK | {"colour": 1, "stream_options": {"x": 1}}).status_code == 200
    assert client.post(CHAT, json=ASK | {"colour": 1, "temperature": "hot"}).status_code == 400


def test_a_prompt_over_the_context_is_refused_with_both_numbers(make):
    client, _engine, _ = make(context=64)
    error = client.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 200}]})
    body = error.json()["error"]
    assert error.status_code == 400 and body["code"] == "context_length_exceeded"
    assert body["n_ctx"] == 64 and str(body["n_prompt_tokens"]) in body["message"] and "64" in body["message"]


def test_an_answer_limit_over_what_is_left_is_clamped(make):
    client, _, _ = make("word " * 400, context=64)
    choice = client.post(CHAT, json=ASK | {"max_tokens": 100000}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_body_over_the_limit_is_too_large_with_and_without_its_length(make):
    client, _, _ = make(settings={"max_body": 1000})
    assert client.post(CHAT, content=b"x" * 1001).status_code == 413
    assert client.post(CHAT, content=iter([b"x" * 600] * 2)).status_code == 413
    assert client.post(CHAT, json=ASK).status_code == 200


def test_a_full_queue_asks_to_come_back(make):
    client, _, _ = make(capacity=0)
    response = client.post(CHAT, json=ASK)
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_an_unknown_model_is_not_found_unless_it_is_an_alias(make):
    client, _, _ = make(settings={"aliases": ("gpt-x",)})
    assert client.post(CHAT, json=ASK | {"model": "gpt-x"}).json()["model"] == "gpt-x"
    response = client.post(CHAT, json=ASK | {"model": "other"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    anything, _, _ = make(settings={"aliases": ("*",)})
    assert anything.post(CHAT, json=ASK | {"model": "other"}).status_code == 200


def test_keys_guard_all_but_health_and_page(make):
    client, _, _ = make(settings={"api_keys": ("right", "also")})
    for path in ("/v1/models", "/metrics", "/api/status"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer also"}).status_code == 200
        assert client.get(path, headers={"x-api-key": "right"}).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"


def test_pages_of_other_sites_may_not_call(make):
    client, _, _ = make()
    assert client.post(CHAT, json=ASK, headers={"origin": "http://evil.example"}).status_code == 403
    assert client.post(CHAT, json=ASK, headers={"origin": "http://testserver"}).status_code == 200
    assert "access-control-allow-origin" not in client.get("/health").headers
    open_, _, _ = make(settings={"cors": ("http://app.example",)})
    answer = open_.post(CHAT, json=ASK, headers={"origin": "http://app.example"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://app.example"


def test_a_fault_is_a_500_that_quotes_nothing_and_passes(make, caplog):
    client, engine, _ = make()
    engine.fault = RuntimeError("the secret prompt")
    whole, streamed = client.post(CHAT, json=ASK), client.post(CHAT, json=ASK | {"stream": True})
    assert whole.status_code == 500 and "RuntimeError" in whole.json()["error"]["message"]
    assert '"server_error"' in streamed.text and "[DONE]" not in streamed.text
    assert "secret" not in whole.text + streamed.text + caplog.text
    engine.fault = None
    assert client.post(CHAT, json=ASK).status_code == 200 and not engine.active


def test_no_route_and_no_such_method(make):
    client, _, _ = make()
    assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert client.get(CHAT).status_code == 405


def test_health_tells_how_far_loading_is(make):
    from starlette.testclient import TestClient

    from ninfer_jax.server import Service, Settings, build_app

    service = Service(Settings("tiny"))
    service.progress["weights"] = (1, 4)
    client = TestClient(build_app(service))
    health = client.get("/health")
    assert health.status_code == 503 and health.json()["progress"]["weights"] == {"done": 1, "total": 4}
    assert client.post(CHAT, json=ASK).status_code == 503
    assert "weights 25 %" in client.post(CHAT, json=ASK).json()["error"]["message"]


def test_text_becomes_ids_and_ids_become_text(make):
    client, engine, _ = make()
    ids = client.post("/tokenize", json={"content": "Hello, 中文 <|im_end|>"}).json()["tokens"]
    assert ids == engine.text.tokenizer.encode("Hello, 中文 <|im_end|>")
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "Hello, 中文 <|im_end|>"
    assert client.post("/tokenize", json=ASK).json()["count"] > 4
    wrong = client.post("/detokenize", json={"tokens": [1, 99999]})
    assert wrong.status_code == 400 and "tokens[1]" in wrong.json()["error"]["message"]


def test_models_are_listed_for_clients_of_both_apis(make):
    client, _, _ = make()
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["type"], model["max_model_len"]) == ("tiny", "model", "model", 4096)
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/other").status_code == 404
