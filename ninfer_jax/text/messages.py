"""Checks a list of chat messages and brings it into the one form that chat templates accept."""

import math
from collections.abc import Mapping
from typing import Any

from ninfer_jax.files import MAX_DIGITS, FileError, lone_surrogate, parse_json, shown

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TOO_LONG = 10**MAX_DIGITS
# Far beyond real tool schemas and arguments; keeps recursion over them within Python's stack.
MAX_DEPTH = 100


def normalize_messages(messages: object) -> list[dict]:
    """A new list of messages for a template; the input is not changed.

    - Content given as a list of text parts becomes one string (parts are joined without a separator).
    - `developer` is the same as `system`. All system messages, wherever they stand, become one leading message: their
      texts in order, separated by an empty line. A single leading one is left exactly as it is.
    - An assistant message may have no content if it has tool calls or reasoning. Reasoning is taken from
      `reasoning_content`, else `thinking`, else `reasoning`.
    - Tool-call arguments given as JSON text become a mapping; "" and "null" mean no parameters.

    Other keys are passed on; values must be JSON values. ValueError names the message, as in
    `messages[2].tool_calls[0].function.arguments`.
    """
    if not isinstance(messages, list):
        raise ValueError(f"messages: must be a list, not {_kind(messages)}")
    system: list[dict] = []
    turns: list[dict] = []
    for index, message in enumerate(messages):
        checked = _message(message, f"messages[{index}]")
        if checked["role"] == "tool" and not turns:
            raise ValueError(f"messages[{index}]: a tool result must come after the assistant message that calls it")
        (system if checked["role"] == "system" else turns).append(checked)
    if len(system) > 1:
        texts = [message["content"] for message in system if message["content"].strip()]
        system = [{"role": "system", "content": "\n\n".join(texts)}]
    return system + turns


def normalize_tools(tools: object) -> list[dict] | None:
    """The tool definitions for a template: a list of objects, each with `function.name`; None if there are none."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools: must be a list, not {_kind(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f"tools[{index}].function: must be an object, not {_kind(function)}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"tools[{index}].function.name: must be a non-empty string")
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def _message(message: object, where: str) -> dict:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: must be an object with a role and content, not {_kind(message)}")
    if "role" not in message:
        raise ValueError(f"{where}.role: missing, allowed are {', '.join(_ROLES)}")
    role = message["role"]
    if role not in _ROLES:
        raise ValueError(f"{where}.role: {role!r} is unknown, allowed are {', '.join(_ROLES)}")
    given: dict[str, Any] = plain(message, where)
    checked: dict[str, Any] = dict(given)
    calls = given.get("tool_calls")
    if calls is not None and role != "assistant":
        raise ValueError(f"{where}.tool_calls: only assistant messages have tool calls, this is a {role} message")
    if role == "developer":
        checked["role"] = "system"
    if role == "assistant":
        if calls:
            checked["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        else:
            checked.pop("tool_calls", None)
        reasoning = next((given[key] for key in _REASONING if given.get(key) is not None), None)
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise ValueError(f"{where}.reasoning_content: must be a string, not {_kind(reasoning)}")
            checked["reasoning_content"] = reasoning
        if given.get("content") is None and (calls or reasoning):
            checked["content"] = ""
            return checked
    checked["content"] = _content(given.get("content"), role, f"{where}.content")
    return checked


def _content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if content is None:
        only = " unless the message has tool_calls or reasoning" if role == "assistant" else ""
        raise ValueError(f"{where}: missing or null, must be a string or a list of text parts{only}")
    raise ValueError(f"{where}: must be a string or a list of text parts, not {_kind(content)}")


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError(f"{where}: must be an object with a type, as {{'type': 'text', 'text': …}}")
    if part["type"] != "text":
        raise ValueError(f"{where}.type: {part['type']!r} is not supported, this engine reads text only")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text: must be a string, not {_kind(part.get('text'))}")
    return part["text"]


def _tool_calls(calls: object, where: str) -> list[dict]:
    if not isinstance(calls, list):
        raise ValueError(f"{where}: must be a list, not {_kind(calls)}")
    checked = []
    for index, call in enumerate(calls):
        name = f"{where}[{index}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f"{name}: must be an object with a name and arguments, not {_kind(function)}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"{name}.name: must be a non-empty string")
        arguments = _arguments(function.get("arguments"), f"{name}.arguments")
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _arguments(arguments: object, where: str) -> dict:
    """Mapping of parameter names to values: the Qwen templates cannot render JSON text."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments, "the text") if arguments.strip() else None
        except FileError as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{where}: must be an object of parameters or its JSON text, not {_kind(parsed)}")
    return plain(parsed, where)


def plain(value: object, where: str) -> Any:
    """A deep copy made of JSON's own types, so that no text can hide from the checks in an object of another type.

    ValueError, beginning with the place at or below `where`: values that JSON has not, such as NaN, bytes and sets, keys that
    are no text, lone surrogates, numbers of more than `MAX_DIGITS` digits, and more than `MAX_DEPTH` levels.
    """

    def copy(value: object, at: str, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if found := lone_surrogate(value):
                raise ValueError(f"{at}: {found}")
            return str.__str__(value)  # of a subclass its text, not what it prints as
        if isinstance(value, int):
            if abs(value) >= _TOO_LONG:
                raise ValueError(f"{at}: a number of more than {MAX_DIGITS} digits")
            return int.__int__(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"{at}: {float(value)} is not a number that JSON has")
            return float.__float__(value)
        if depth == MAX_DEPTH:
            raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            return {_key(key, at): copy(item, _below(at, key), depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [copy(item, f"{at}[{index}]", depth + 1) for index, item in enumerate(value)]
        raise ValueError(f"{at}: {type(value).__name__} is not a type that JSON has")

    return copy(value, where, 0)


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{where}: has a key that is not a string ({shown(key)})")
    if found := lone_surrogate(key):
        raise ValueError(f"{where}: the key {shown(key)}: {found}")
    return str.__str__(key)


def _below(where: str, key: object) -> str:
    return f"{where}.{key}" if isinstance(key, str) and key.isidentifier() else f"{where}[{shown(key)}]"


def _kind(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), "a list" if isinstance(value, list) else type(value).__name__)
