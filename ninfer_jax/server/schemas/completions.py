"""`POST /v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ninfer_jax.server.schemas.common import Count, JsonObject, Sampling, Schema, StreamOptions, Tagged


class CompletionRequest(Tagged, Sampling):
    """Raw text or token ids to continue. logprobs: alternatives a token."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    best_of: Literal[1] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: JsonObject | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TokenizeRequest(Schema):
    """Text, or messages as a chat request has them. add_special: read control tokens that the text spells."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Schema):
    """Token ids to show as text."""

    model: str | None = None
    tokens: list[int]
