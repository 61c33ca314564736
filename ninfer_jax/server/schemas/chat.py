"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ninfer_jax.server.schemas.common import Count, JsonObject, Sampling, StreamOptions, Tagged, Thinking


class ChatRequest(Tagged, Thinking, Sampling):
    """Messages are checked where they are rendered, so that errors name the message."""

    messages: list[Any]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    response_format: JsonObject | None = None
    store: Literal[False] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
