"""An agent's loop: the model calls tools until it answers. `pip install openai`, a model that knows tools behind the server.

python examples/serving/agent.py "How large are the files of this folder together?"
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import openai

HERE = Path.cwd()


def list_files(pattern: str = "*") -> str:
    """Names and sizes of the files of the working directory that match a pattern."""
    return "\n".join(f"{path.stat().st_size} {path.name}" for path in sorted(HERE.glob(pattern)) if path.is_file())


def read_file(name: str, lines: int = 50) -> str:
    """The first lines of a file of the working directory."""
    path = (HERE / name).resolve()
    if HERE not in path.parents:
        return "error: outside of the working directory"
    return "\n".join(path.read_text("utf-8", "replace").splitlines()[:lines])


TOOLS: dict[str, tuple[Callable[..., str], dict]] = {
    "list_files": (list_files, {"pattern": {"type": "string"}}),
    "read_file": (read_file, {"name": {"type": "string"}, "lines": {"type": "integer"}}),
}


def described() -> list[dict]:
    return [
        {
            "type": "function",
            "function": {"name": name, "description": function.__doc__, "parameters": {"type": "object", "properties": properties}},
        }
        for name, (function, properties) in TOOLS.items()
    ]


def run(call) -> str:
    """The result of a call; what went wrong is told to the model, which may do better."""
    try:
        return TOOLS[call.function.name][0](**json.loads(call.function.arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def main(question: str, url: str = "http://127.0.0.1:8080", turns: int = 10, tokens: int = 2000) -> list[dict]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("NINFER_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": question}]
    for _ in range(turns):
        # One key for the conversation: its cache entry stays with it. What the model thought goes back with its turn.
        message = (
            client.chat.completions.create(
                model=model, messages=messages, tools=described(), max_tokens=tokens, extra_body={"prompt_cache_key": "agent"}
            )
            .choices[0]
            .message
        )
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            break
        for call in message.tool_calls:
            print(f"{call.function.name}({call.function.arguments})", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call)})
    return messages


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "What is in this folder?")
