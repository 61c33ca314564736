"""`/v1/completions` in the process, with a script for a model."""

from __future__ import annotations

import json

import pytest

ASK = {"prompt": "Once", "max_tokens": 100}


def chunks_of(response) -> list[dict]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_text_goes_on_as_it_is_tags_included(make):
    client, engine, _ = make(" upon a <think> time</think>.<|im_end|>")
    body = client.post("/v1/completions", json=ASK).json()
    assert body["choices"][0]["text"] == " upon a <think> time</think>." and body["choices"][0]["finish_reason"] == "stop"
    assert engine.submitted[0]["prompt"] == "Once"
    assert client.post("/v1/completions", json=ASK | {"echo": True}).json()["choices"][0]["text"].startswith("Once upon")


def test_the_limit_is_that_of_the_api_where_none_is_given(make):
    client, _, _ = make("word " * 50)
    body = client.post("/v1/completions", json={"prompt": "x"}).json()
    assert body["usage"]["completion_tokens"] == 16 and body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("rounds", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("own fox", "The quick br"), (["brown fox jumps", "k b"], "The quic"), ("The", ""), ("zebra", "The quick brown fox")],
)
def test_stop_strings_are_found_however_the_answer_is_cut(make, rounds, stop, text):
    client, engine, _ = make("The quick brown fox<|im_end|>", round=rounds)
    whole = client.post("/v1/completions", json=ASK | {"stop": stop}).json()
    streamed = chunks_of(client.post("/v1/completions", json=ASK | {"stop": stop, "stream": True}))
    assert whole["choices"][0]["text"] == "".join(c["choices"][0]["text"] for c in streamed) == text
    assert whole["choices"][0]["finish_reason"] == streamed[-1]["choices"][0]["finish_reason"] == "stop"
    assert not engine.active


@pytest.mark.parametrize("rounds", [1, 3])
def test_characters_are_never_cut(make, rounds):
    text = "🦙 ďábelské 中文 👩\u200d👩\u200d👧 é"
    client, _, _ = make(text + "<|im_end|>", round=rounds)
    streamed = chunks_of(client.post("/v1/completions", json=ASK | {"stream": True}))
    assert "".join(c["choices"][0]["text"] for c in streamed) == text


def test_several_prompts_have_several_answers_each(make):
    client, _, _ = make(lambda prompt: f"{prompt}!<|im_end|>")
    request = ASK | {"prompt": ["a", "b"], "n": 2, "stream_options": {"include_usage": True}}
    body = client.post("/v1/completions", json=request).json()
    assert [choice["text"] for choice in body["choices"]] == ["a!", "a!", "b!", "b!"]
    streamed = chunks_of(client.post("/v1/completions", json=request | {"stream": True}))
    assert streamed[-1]["usage"] == body["usage"] and body["usage"]["prompt_tokens"] == 2


def test_ids_are_prompts_too(make):
    client, engine, _ = make("x<|im_end|>")
    ids = engine.text.tokenizer.encode("Once upon")
    for prompt in (ids, [ids, ids]):
        assert client.post("/v1/completions", json=ASK | {"prompt": prompt}).status_code == 200
    assert [one["ids"] for one in engine.submitted] == [ids] * 3


def test_logprobs_are_four_lists_of_one_length(make):
    client, _, _ = make("one two three<|im_end|>")
    lists = client.post("/v1/completions", json=ASK | {"logprobs": 1}).json()["choices"][0]["logprobs"]
    assert len({len(value) for value in lists.values()}) == 1 and "".join(lists["tokens"]) == "one two three<|im_end|>"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ""}, "prompt: empty"),
        ({"prompt": []}, "prompt: empty"),
        ({"prompt": [[]]}, "prompt: empty"),
        ({"prompt": [1, 99999]}, "prompt: holds token id 99999"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt: 65 prompts"),
        ({"suffix": "x"}, "suffix: this server has no such field"),
        ({"echo": True, "logprobs": 1}, "echo: not together"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_one_line_names_the_field(make, change, said):
    client, engine, _ = make()
    response = client.post("/v1/completions", json=ASK | change)
    assert response.status_code == 400 and said in response.json()["error"]["message"]
    assert not engine.active
