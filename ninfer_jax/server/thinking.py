"""Whether a request thinks, how hard and how long: one answer from the many places where clients say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ninfer_jax.server.errors import bad
from ninfer_jax.server.schemas.common import Thinking
from ninfer_jax.server.schemas.messages import CountTokensRequest
from ninfer_jax.text import ChatTemplate

# The efforts that Qwen's template knows; others go to the nearest.
_TO_TEMPLATE = {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"}
_BUDGET_FIELDS = ("thinking_budget", "thinking_token_budget")


@dataclass(frozen=True)
class Thought:
    """options: for the chat template. budget: reasoning tokens at most, None for no bound. hidden: think, but do not show it."""

    options: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None
    hidden: bool = False


def thought_of(request: Thinking, template: ChatTemplate | None) -> Thought:
    """The wishes of an OpenAI request. Two places that contradict each other are refused, so is a switch the template lacks."""
    knows = frozenset() if template is None else template.options
    options = dict(request.chat_template_kwargs or {})
    budget, hidden = request.thinking_budget, False
    for name in _BUDGET_FIELDS:
        if name in options:
            budget = _agree("thinking_budget", budget, _natural(f"chat_template_kwargs.{name}", options.pop(name)))
    effort, on = request.reasoning_effort, request.enable_thinking
    if (reasoning := request.reasoning) is not None:
        effort = _agree("reasoning_effort", effort, reasoning.effort)
        on = _agree("enable_thinking", on, reasoning.enabled)
        budget = _agree("thinking_budget", budget, reasoning.max_tokens)
        hidden = bool(reasoning.exclude)
    if (given := options.pop("enable_thinking", None)) is not None:
        on = _agree("enable_thinking", on, given)
    if effort == "none":
        on = _agree("enable_thinking", on, False)
    if on is not None:
        options["enable_thinking"] = on
    if request.preserve_thinking is not None:
        options["preserve_thinking"] = _agree("preserve_thinking", request.preserve_thinking, options.get("preserve_thinking"))
    if effort in _TO_TEMPLATE and "reasoning_effort" in knows and on is not False:
        options.setdefault("reasoning_effort", _TO_TEMPLATE[effort])
    return Thought(options, 0 if budget == 0 else budget, hidden)


def thought_of_messages(request: CountTokensRequest, template: ChatTemplate | None) -> Thought:
    """The wishes of an Anthropic request: as in that API it does not think unless it is told to."""
    knows = frozenset() if template is None else template.options
    config, output = request.thinking, request.output_config
    effort = output.effort if output else None
    options: dict[str, Any] = {}
    on = config is not None and config.type != "disabled" and effort != "none"
    if "enable_thinking" in knows:
        options["enable_thinking"] = on
    if on and effort in _TO_TEMPLATE and "reasoning_effort" in knows:
        options["reasoning_effort"] = _TO_TEMPLATE[effort]
    return Thought(options, config.budget_tokens if config and on else None, bool(config and config.display == "omitted"))


def _agree(name: str, one: Any, other: Any) -> Any:
    if one is not None and other is not None and one != other:
        raise bad(f"{name}: given twice, as {one!r} and as {other!r}", name)
    return other if one is None else one


def _natural(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise bad(f"{name}: must be a whole number from 0", name)
    return value
