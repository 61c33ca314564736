"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ninfer_jax.server.schemas.common import Count, Effort, JsonObject, Schema


class ThinkingConfig(Schema):
    """budget_tokens: reasoning tokens at most. display: "omitted" thinks without showing it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Schema):
    """effort: of the reasoning. format: a JSON schema for the answer."""

    effort: Effort | None = None
    format: JsonObject | None = None
    task_budget: JsonObject | None = None


class ToolChoice(Schema):
    """The tool that has to be called, if any."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(Schema):
    """All that makes up a prompt."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None


class MessagesRequest(CountTokensRequest):
    """max_tokens is clamped to what the context has left."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    metadata: JsonObject | None = None
    service_tier: str | None = None
