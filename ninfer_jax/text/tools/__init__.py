"""Tool calls and reasoning in an answer: text in, events out, wherever it is cut."""

from ninfer_jax.text.tools.answer import CLOSE_REASONING, AnswerParser, Outcome
from ninfer_jax.text.tools.calls import CallParser
from ninfer_jax.text.tools.choice import ToolPlan, tool_plan
from ninfer_jax.text.tools.events import CallArguments, CallBegin, CallEnd, ContentText, Event, ReasoningText
from ninfer_jax.text.tools.values import Unfit, typed

__all__ = [
    "CLOSE_REASONING",
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CallParser",
    "ContentText",
    "Event",
    "Outcome",
    "ReasoningText",
    "ToolPlan",
    "Unfit",
    "tool_plan",
    "typed",
]
