"""`POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ninfer_jax.server.schemas.common import Count, JsonObject, Sampling, Schema, StreamOptions, Tagged, Thinking


class TextConfig(Schema):
    """format: of the answer, `{"type": "json_schema", ...}` for instance. verbosity: accepted, the model has no such switch."""

    format: JsonObject | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Tagged, Thinking, Sampling):
    """Nothing is stored: a request carries its whole conversation, as Codex' do."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    client_metadata: JsonObject | None = None
