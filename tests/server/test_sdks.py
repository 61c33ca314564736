"""The real `openai` and `anthropic` SDKs against a server process' port, with a script for a model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest
from server.conftest import on_a_port
from server.scripted import Scripted

from ninfer_jax.server import Service, Settings

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


def script(prompt: str) -> str:
    """A thought and an answer, which calls the tool if there is one and it has not answered yet."""
    said = "It rains." if "<tool_response>" in prompt else CALL if "weather" in prompt else "Hello there!"
    thought = "" if prompt.endswith("</think>\n\n") else "Hm.\n</think>\n\n"
    return f"{thought}{said}<|im_end|>"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with on_a_port(Service(Settings("tiny", api_keys=("key",)), Scripted(script))) as address:
        yield address


@pytest.fixture(scope="module")
def oa(address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def an(address) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="key", max_retries=0)


def test_openai_lists_models(oa):
    assert [model.id for model in oa.models.list()] == ["tiny"]
    assert oa.models.retrieve("tiny").id == "tiny"


def test_openai_chats_whole_and_streamed(oa):
    messages = [{"role": "user", "content": "Hi"}]
    answer = oa.chat.completions.create(model="tiny", messages=messages, seed=1, temperature=0.5, extra_body={"top_k": 5})
    assert answer.choices[0].message.content == "Hello there!" and answer.choices[0].message.reasoning_content == "Hm."
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = oa.chat.completions.create(model="tiny", messages=messages, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there!"
    assert chunks[-1].usage == answer.usage
    with oa.chat.completions.stream(model="tiny", messages=messages) as events:
        kinds = {event.type for event in events}
        assert events.get_final_completion().choices[0].message.content == "Hello there!"
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_openai_calls_a_tool_and_goes_on_with_its_result(oa):
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    messages: list = [{"role": "user", "content": "How is it in Paris?"}]
    message = oa.chat.completions.create(model="tiny", messages=messages, tools=[tool]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert oa.chat.completions.create(model="tiny", messages=messages, tools=[tool]).choices[0].message.content == "It rains."
    with oa.chat.completions.stream(model="tiny", messages=messages[:1], tools=[tool]) as events:
        streamed = events.get_final_completion().choices[0].message
    assert json.loads(streamed.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_openai_continues_text(oa):
    assert oa.completions.create(model="tiny", prompt="x", max_tokens=50).choices[0].text.endswith("Hello there!")
    pieces = oa.completions.create(model="tiny", prompt="x", max_tokens=50, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces).endswith("Hello there!")


def test_openai_responses_whole_and_streamed(oa):
    answer = oa.responses.create(model="tiny", input="Hi", instructions="Be brief.", store=False)
    assert (
        answer.output_text == "Hello there!"
        and answer.status == "completed"
        and answer.usage.output_tokens_details.reasoning_tokens
    )
    with oa.responses.stream(model="tiny", input="Hi", reasoning={"summary": "auto"}) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output_text == "Hello there!" and final.output[0].summary[0].text == "Hm."
    assert {"response.output_text.delta", "response.reasoning_summary_text.delta", "response.completed"} <= set(kinds)


def test_openai_responses_call_a_tool_and_go_on_with_its_result(oa):
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    first = oa.responses.create(model="tiny", input="How is it in Paris?", tools=[tool], include=["reasoning.encrypted_content"])
    call = first.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
    turns = [{"role": "user", "content": "How is it in Paris?"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert oa.responses.create(model="tiny", input=turns, tools=[tool]).output_text == "It rains."
    with oa.responses.stream(model="tiny", input="How is it in Paris?", tools=[tool]) as events:
        assert json.loads(events.get_final_response().output[-1].arguments) == {"city": "Paris"}


def test_openai_gets_its_own_exceptions(oa, address):
    with pytest.raises(openai.BadRequestError) as refused:
        oa.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 5000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        oa.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()


def test_anthropic_answers_whole_and_streamed(an):
    request: dict = dict(model="tiny", max_tokens=2000, messages=[{"role": "user", "content": "Hi"}], system="Be brief.")
    answer = an.messages.create(**request)
    assert [block.text for block in answer.content] == ["Hello there!"] and answer.stop_reason == "end_turn"
    assert (
        an.messages.count_tokens(**{k: v for k, v in request.items() if k != "max_tokens"}).input_tokens
        == answer.usage.input_tokens
    )
    with an.messages.stream(**request, thinking={"type": "enabled", "budget_tokens": 1024}) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "Hello there!" and final.content[0].thinking == "Hm." and final.content[0].signature


def test_anthropic_calls_a_tool_and_goes_on_with_its_result(an):
    tools = [{"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}]
    messages: list = [{"role": "user", "content": "How is it in Paris?"}]
    request: dict = dict(model="tiny", max_tokens=2000, tools=tools, thinking={"type": "adaptive"})
    first = an.messages.create(messages=messages, **request)
    call = first.content[-1]
    assert call.type == "tool_use" and call.input == {"city": "Paris"} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert an.messages.create(messages=messages, **request).content[-1].text == "It rains."
    with an.messages.stream(messages=messages[:1], **request) as events:
        assert events.get_final_message().content[-1].input == {"city": "Paris"}


def test_anthropic_lists_models_and_gets_its_own_exceptions(an, address):
    assert [model.id for model in an.models.list()] == ["tiny"]
    assert an.models.retrieve("tiny").display_name == "tiny"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        an.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).models.list()
