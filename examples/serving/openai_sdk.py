"""Chat, stream, reason and call a tool with OpenAI's SDK: `pip install openai`, `ninfer-jax serve tiny` in another shell."""

import os

import openai


def main(url: str = "http://127.0.0.1:8080", tokens: int = 120) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("NINFER_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Write two lines of a play."}]

    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinking_budget": tokens // 4},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(getattr(choice.delta, "reasoning_content", None) or choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n[{chunk.usage.completion_tokens} tokens, {cached} of the prompt cached]")

    answer = client.responses.create(model=model, input="Go on.", max_output_tokens=tokens, reasoning={"effort": "none"})
    print(answer.output_text)

    text = client.completions.create(model=model, prompt="ROMEO.", max_tokens=40, temperature=0)
    print("ROMEO." + text.choices[0].text)


if __name__ == "__main__":
    main()
