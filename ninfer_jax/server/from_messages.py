"""Anthropic's messages, blocks and tools, as the chat template wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer_jax.server.conversation import tool_results_in_order, without_nonce
from ninfer_jax.server.errors import bad
from ninfer_jax.server.opaque import opened
from ninfer_jax.server.schemas import CountTokensRequest

_BETWEEN = "\n\n"  # text blocks of one message


def chat_messages(request: CountTokensRequest, keep_nonces: bool) -> tuple[list[dict[str, Any]], list[int]]:
    """(messages for the template, numbers of messages behind which the client asks for a cache entry). ApiError names the block."""
    messages: list[dict[str, Any]] = []
    marks: list[int] = []
    if request.system:
        blocks = [{"type": "text", "text": request.system}] if isinstance(request.system, str) else request.system
        texts = [_text(block, f"system[{at}]") for at, block in enumerate(blocks)]
        texts = texts if keep_nonces else [text for text in map(without_nonce, texts) if text]
        messages.append({"role": "system", "content": _BETWEEN.join(texts)})
    in_system = _marked(request.system) or _marked(request.tools)
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise bad(f"{where}: must be an object with a role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad(f"{where}.role: must be user, assistant or system, not {role!r}")
        if unknown := message.keys() - {"role", "content", "id", "cache_control"}:
            raise bad(f"{where}.{min(map(str, unknown))}: a message has no such field")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _assistant(content, where) if role == "assistant" else _user(content, where, role)
            if _marked(content):
                marks.append(len(messages))
        else:
            raise bad(f"{where}.content: must be text or a list of blocks")
    if messages and messages[-1]["role"] == "assistant":
        last = len(request.messages) - 1
        raise bad(f"messages[{last}]: the last message is the assistant's; answers that go on from it are not supported")
    marks = ([1] if in_system and messages and messages[0]["role"] == "system" else []) + marks
    return tool_results_in_order(messages), marks


def chat_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Anthropic's tool definitions in OpenAI's form. ApiError names one that has no schema of its own."""
    if tools is None:
        return None
    found = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise bad(f"{where}: must be an object with a name and an input_schema")
        if tool.get("type") not in (None, "custom"):
            raise bad(f"{where}.type: {tool['type']!r} is not supported, only tools with an input_schema are")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise bad(f"{where}.name: must be a non-empty string")
        if not isinstance(tool.get("input_schema"), Mapping):
            raise bad(f"{where}.input_schema: must be a JSON schema")
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
        found.append({"type": "function", "function": function})
    return found


def _user(blocks: list[Any], where: str, role: str) -> list[dict[str, Any]]:
    """Tool results first, as that API wants them, then the text."""
    results, texts = [], []
    for at, block in enumerate(blocks):
        here = f"{where}.content[{at}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result" and role == "user":
            if not isinstance(block.get("tool_use_id"), str):
                raise bad(f"{here}.tool_use_id: missing")
            content = block.get("content")
            if isinstance(content, list):
                content = _BETWEEN.join(_text(part, f"{here}.content[{i}]") for i, part in enumerate(content))
            elif content is None:
                content = ""
            elif not isinstance(content, str):
                raise bad(f"{here}.content: must be text or a list of text blocks")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        else:
            texts.append(_text(block, here))
    return results + ([{"role": role, "content": _BETWEEN.join(texts)}] if texts or not results else [])


def _assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    thoughts, texts, calls = [], [], []
    for at, block in enumerate(blocks):
        here = f"{where}.content[{at}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            thought = block.get("thinking") or opened(block.get("signature")) or ""
            if not isinstance(thought, str):
                raise bad(f"{here}.thinking: must be a string")
            thoughts.append(thought)
        elif kind == "redacted_thinking":
            if (thought := opened(block.get("data"))) is None:
                raise bad(f"{here}.data: this reasoning was not written here and cannot be read")
            thoughts.append(thought)
        elif kind == "tool_use":
            if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str) or not block["name"]:
                raise bad(f"{here}: a tool_use block needs an id and a name")
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise bad(f"{here}.input: must be an object")
            calls.append({"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": given}})
        else:
            texts.append(_text(block, here))
    message: dict[str, Any] = {"role": "assistant", "content": _BETWEEN.join(texts)}
    if thoughts:
        message["reasoning_content"] = _BETWEEN.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(block: Any, where: str) -> str:
    if not isinstance(block, Mapping):
        raise bad(f"{where}: must be an object with a type")
    if block.get("type") != "text":
        raise bad(f"{where}.type: {block.get('type')!r} is not supported here, this engine reads text only")
    if not isinstance(block.get("text"), str):
        raise bad(f"{where}.text: must be a string")
    return block["text"]


def _marked(blocks: Any) -> bool:
    return isinstance(blocks, list) and any(isinstance(block, Mapping) and block.get("cache_control") for block in blocks)
