"""Fields that several APIs share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
JsonObject = dict[str, Any]
Count = Annotated[int, Field(ge=1)]


class Schema(BaseModel):
    """An object whose fields are all known and have the JSON types they should have: no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Sampling(Schema):
    """Settings of the draw. A field that is missing or null takes the checkpoint's own default; 0 is 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class StreamOptions(Schema):
    """include_usage: a last chunk with the usage. include_obfuscation: accepted, nothing is obfuscated."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Reasoning(Schema):
    """OpenRouter's and the Responses API's object. max_tokens: the thinking budget. exclude: think, but do not show it."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    exclude: bool | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Thinking(Schema):
    """Switches of the chat template and the budget, in all the places where clients put them."""

    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: JsonObject | None = None


class Tagged(Schema):
    """Fields that say who asks and for what. None changes an answer; prompt_cache_key tells conversations apart."""

    model: str | None = None
    user: str | None = None
    metadata: JsonObject | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
