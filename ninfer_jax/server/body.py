"""A request's body: read within bounds, parsed, and checked against its schema, with errors that name the field."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ninfer_jax.files import FileError, parse_json, printable, shown
from ninfer_jax.server.errors import ApiError, bad
from ninfer_jax.text.messages import MAX_DEPTH, plain

M = TypeVar("M", bound=BaseModel)
# A string, closed or not, or a bracket. Possessive: a body made for it does not make the search quadratic.
_NESTING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)

_PASSED_OVER, _PASSING_SECONDS = 256 << 20, 2.0  # of a body that is too large: bytes and seconds at most


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The bytes; ApiError 413 over `limit`, 408 when they are not there after `seconds`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        await _pass_over(request)
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body was not complete after {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client closed the connection") from None
    if size > limit:
        parts.clear()
        await _pass_over(request)
        raise _too_large(limit)
    return b"".join(parts)


async def _pass_over(request: Request) -> None:
    """Reads on for a moment: a client in the midst of sending, whose connection is closed, never sees the answer."""
    left = _PASSED_OVER
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_PASSING_SECONDS):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b"")) + 1
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, made of JSON's own types; ApiError 400 for anything else."""
    if _depth(body) > MAX_DEPTH:
        raise bad(f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        parsed = parse_json(body.decode("utf-8"), "the body")
    except UnicodeDecodeError as error:
        raise bad(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (FileError, RecursionError) as error:
        raise bad(str(error) or "the body is not valid JSON") from None
    if not isinstance(parsed, dict):
        raise bad("the body must be a JSON object")
    try:
        plain(dict.fromkeys(parsed), "the body")  # the keys alone, which name what is below them
        return {key: plain(value, shown(key)[1:-1]) for key, value in parsed.items()}
    except ValueError as error:
        raise bad(str(error)) from None


def validated(schema: type[M], given: dict[str, Any], lenient: bool) -> M:
    """The request as its schema has it. Fields that the schema has not are refused, or left out if `lenient`."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        unknown = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
        if lenient and unknown:
            for place in unknown:
                _remove(given, place)
            return validated(schema, given, lenient)
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """One line about the first thing that is wrong."""
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    where = path_of(first["loc"])
    if first["type"] == "extra_forbidden":
        return bad(f"{where}: this server has no such field (ninfer-jax serve --lenient ignores them)", where, "unknown_parameter")
    if first["type"] == "missing":
        return bad(f"{where}: missing", where, "missing_required_parameter")
    what = first["msg"][:1].lower() + first["msg"][1:]
    given = "" if isinstance(first["input"], dict | list) else f", not {shown(first['input'])}"
    if first["type"] == "value_error":
        what, given = str(first.get("ctx", {}).get("error", what)), ""
    return bad(printable(f"{where}: {what}{given}"), where)


def path_of(location: tuple[int | str, ...]) -> str:
    """`messages[2].content`, from pydantic's location; the names of a union's members are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not re.search(r"[\[(\-]|^(str|int|float|bool|list|dict)$|^[A-Z]", part):
            text += f".{part}" if text else part
    return text or "the body"


def _remove(given: Any, place: tuple[int | str, ...]) -> None:
    """Takes a field out. Names in the place that are no keys are of a union's members."""
    for step in place[:-1]:
        if (isinstance(given, dict) and step in given) or (isinstance(given, list) and isinstance(step, int)):
            given = given[step]  # pyright: ignore[reportArgumentType, reportCallIssue]
    if isinstance(given, dict):
        given.pop(place[-1], None)


def _depth(body: bytes) -> int:
    """The deepest nesting, as far as brackets outside of strings tell."""
    depth = deepest = 0
    for match in _NESTING.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes (ninfer-jax serve --max-body)")
