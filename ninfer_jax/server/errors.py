"""Refusals, in the shape of the API that was called."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from ninfer_jax.files import printable

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status. param: the field that is to blame. code: OpenAI's word for the case. retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        extra: dict[str, Any] | None = None,
    ):
        super().__init__(printable(message))
        self.status, self.param, self.code, self.retry_after, self.extra = status, param, code, retry_after, extra or {}

    @property
    def message(self) -> str:
        return str(self)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400. Without param, the field that the message begins with, as this project's messages do."""
    if param is None:
        head = message.split(":")[0].split(" ")[0]
        param = head if head.replace("_", "a").replace(".", "a").replace("[", "a").replace("]", "a").isalnum() else None
    return ApiError(400, message, param=param, code=code)


def too_long(prompt: int, context: int) -> ApiError:
    """A prompt that leaves no room for an answer; both numbers in words that clients of either API look for."""
    return ApiError(
        400,
        f"prompt is too long: {prompt} tokens > {context - 1} maximum; this model's maximum context length is {context} tokens, "
        "prompt and answer together",
        param="messages",
        code="context_length_exceeded",
        extra={"n_prompt_tokens": prompt, "n_ctx": context},
    )


def error_body(error: ApiError, anthropic: bool) -> dict[str, Any]:
    """The JSON object that says it."""
    if anthropic:
        kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    kind = _OPENAI.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code, **error.extra}}


def error_response(error: ApiError, path: str) -> Response:
    """The answer to a request on `path`."""
    headers = {} if error.retry_after is None else {"Retry-After": f"{max(1, round(error.retry_after))}"}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    body = json.dumps(error_body(error, is_anthropic(path)), ensure_ascii=False)
    return Response(body, error.status, headers, "application/json")


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path.startswith("/v1/messages")
