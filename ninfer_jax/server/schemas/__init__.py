"""Requests of every API: what is read of them, and nothing else is let through."""

from ninfer_jax.server.schemas.chat import ChatRequest
from ninfer_jax.server.schemas.common import Schema
from ninfer_jax.server.schemas.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from ninfer_jax.server.schemas.messages import CountTokensRequest, MessagesRequest
from ninfer_jax.server.schemas.responses import ResponsesRequest

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "CountTokensRequest",
    "DetokenizeRequest",
    "MessagesRequest",
    "ResponsesRequest",
    "Schema",
    "TokenizeRequest",
]
