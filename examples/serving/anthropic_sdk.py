"""Messages with Anthropic's SDK: `pip install anthropic`, `ninfer-jax serve tiny` in another shell."""

import os

import anthropic


def main(url: str = "http://127.0.0.1:8080", tokens: int = 120) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=os.environ.get("NINFER_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Write two lines of a play."}]
    print(client.messages.count_tokens(model=model, messages=messages).input_tokens, "tokens in the prompt")

    with client.messages.stream(model=model, max_tokens=tokens, messages=messages) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        usage = stream.get_final_message().usage
    print(f"\n[{usage.output_tokens} tokens, {usage.cache_read_input_tokens} of the prompt cached]")


if __name__ == "__main__":
    main()
