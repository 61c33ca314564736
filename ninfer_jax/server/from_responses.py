"""Items of the Responses API, as the chat template wants them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ninfer_jax.files import shown
from ninfer_jax.server.conversation import tool_results_in_order
from ninfer_jax.server.errors import bad
from ninfer_jax.server.opaque import opened
from ninfer_jax.server.schemas import ResponsesRequest

_TYPE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


def chat_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages of `instructions` and `input`. Items of one assistant turn (reasoning, text, calls) become one message.
    ApiError names the item."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    turn: dict[str, Any] | None = None  # the assistant's, still open
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise bad(f"{where}: must be an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if (kind == "message" and item.get("role") != "assistant") or kind == "function_call_output":
            turn = None
            messages.append(_output(item, where) if kind == "function_call_output" else _message(item, where))
            continue
        if kind not in ("message", "reasoning", "function_call"):
            raise bad(f"{where}.type: {kind!r} is not supported")
        if turn is None or (kind != "function_call" and ("tool_calls" in turn or turn["content"])):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if kind == "message":
            turn["content"] = _text(item.get("content"), f"{where}.content")
        elif kind == "reasoning":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item, where)
        else:
            turn.setdefault("tool_calls", []).append(_call(item, where))
    return tool_results_in_order([m for m in messages if m != {"role": "assistant", "content": ""}])


def chat_tools(tools: list[Any] | None) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """(function tools in the chat API's form, types of the others, which are left out)."""
    found, skipped = [], []
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise bad(f"tools[{index}].type: missing")
        if not _TYPE.fullmatch(kind):  # it goes into a header
            raise bad(f"tools[{index}].type: {shown(kind)} is no name of a type")
        if kind != "function":
            skipped.append(kind)
            continue
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found or None, tuple(dict.fromkeys(skipped))


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise bad(f"{where}.role: must be user, assistant, system or developer, not {role!r}")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _output(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise bad(f"{where}.call_id: missing")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"), f"{where}.output")}


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str) or not isinstance(item.get("name"), str) or not item["name"]:
        raise bad(f"{where}: a function_call needs a call_id and a name")
    function = {"name": item["name"], "arguments": item.get("arguments")}
    return {"id": item["call_id"], "type": "function", "function": function}


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of content, else of the blob that was made here, else of the summary."""
    if item.get("content"):
        return _text(item["content"], f"{where}.content")
    if (text := opened(item.get("encrypted_content"))) is not None:
        return text
    return _text(item.get("summary") or [], f"{where}.summary")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where}: must be text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            raise bad(f"{where}[{index}].type: {kind!r} is not supported, this engine reads text only")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise bad(f"{where}[{index}].text: must be a string")
        texts.append(text)
    return "".join(texts)
