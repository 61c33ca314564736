"""Output items of the Responses API, as they grow and with the events that tell of it."""

from __future__ import annotations

import secrets
from typing import Any

from ninfer_jax.server.opaque import sealed
from ninfer_jax.text.tools import CallArguments, CallBegin, CallEnd, ContentText, Event, ReasoningText


class Items:
    """output: the finished items. Of the events, `output_item.added` comes before any delta and `output_item.done` has the item
    whole, which is what Codex keeps.

    summary: reasoning goes out as its own summary instead of as reasoning text. seal: with a blob that restores it. hidden: without
    either.
    """

    def __init__(self, summary: bool = False, seal: bool = False, hidden: bool = False):
        self.output: list[dict[str, Any]] = []
        self._summary, self._seal, self._hidden = summary, seal, hidden
        self._item: dict[str, Any] | None = None
        self._text = ""

    def events(self, events: list[Event]) -> list[dict[str, Any]]:
        """The API's events for a round's; neighbouring text is one delta."""
        said: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ReasoningText):
                said += self._begin("reasoning", {"summary": []} if self._summary else {"summary": [], "content": []})
                if not self._hidden:
                    self._append(said, "reasoning_summary_text" if self._summary else "reasoning_text", event.text)
                else:
                    self._text += event.text
            elif isinstance(event, ContentText):
                said += self._begin("message", {"role": "assistant", "content": []})
                self._append(said, "output_text", event.text)
            elif isinstance(event, CallBegin):
                said += self.close()
                said += self._begin("function_call", {"call_id": event.id, "name": event.name, "arguments": ""})
            elif isinstance(event, CallArguments):
                self._append(said, "function_call_arguments", event.delta)
            elif isinstance(event, CallEnd):
                said += self.close("completed" if event.complete else "incomplete")
        return said

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """The end of the item that is open, if one is."""
        if self._item is None:
            return []
        item, at, text = self._item, self._at(), self._text
        said: list[dict[str, Any]] = []
        if item["type"] == "message":
            part = _output_text(text)
            said = [
                {"type": "response.output_text.done", **at, "content_index": 0, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
            ]
            item["content"] = [part]
        elif item["type"] == "function_call":
            said = [{"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": text}]
            item["arguments"] = text
        else:
            said = self._close_reasoning(item, at, text)
        item["status"] = status
        self.output.append(item)
        self._item, self._text = None, ""
        return [*said, {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}]

    def _close_reasoning(self, item: dict[str, Any], at: dict[str, Any], text: str) -> list[dict[str, Any]]:
        if self._seal:
            item["encrypted_content"] = sealed(text)
        if self._hidden:
            return []
        if not self._summary:
            item["content"] = [{"type": "reasoning_text", "text": text}]
            return [{"type": "response.reasoning_text.done", **at, "content_index": 0, "text": text}]
        part = {"type": "summary_text", "text": text}
        item["summary"] = [part]
        return [
            {"type": "response.reasoning_summary_text.done", **at, "summary_index": 0, "text": text},
            {"type": "response.reasoning_summary_part.done", **at, "summary_index": 0, "part": part},
        ]

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        if self._item is not None and self._item["type"] == kind:
            return []
        said = self.close()
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self._item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        at = self._at()
        said.append({"type": "response.output_item.added", "output_index": at["output_index"], "item": dict(self._item)})
        if kind == "message":
            said.append({"type": "response.content_part.added", **at, "content_index": 0, "part": _output_text("")})
        elif kind == "reasoning" and self._summary and not self._hidden:
            part = {"type": "summary_text", "text": ""}
            said.append({"type": "response.reasoning_summary_part.added", **at, "summary_index": 0, "part": part})
        return said

    def _append(self, said: list[dict[str, Any]], name: str, text: str) -> None:
        self._text += text
        kind = f"response.{name}.delta"
        if said and said[-1]["type"] == kind:
            said[-1]["delta"] += text
            return
        event = {"type": kind, **self._at(), "delta": text}
        if name in ("output_text", "reasoning_text"):
            event["content_index"] = 0
        if name == "reasoning_summary_text":
            event["summary_index"] = 0
        if name == "output_text":
            event["logprobs"] = []
        said.append(event)

    def _at(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.output)}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
