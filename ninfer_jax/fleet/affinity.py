"""The conversation of a request and the links of its prompt, from headers and body, without a tokenizer.

A prompt is a chain of links: tools and system text, then a message each. A link's digest covers all that stands before it, so equal
digests mean equal beginnings. The next turn of a conversation begins with the links of the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer_jax.server.conversation import without_nonce
from ninfer_jax.server.service import SESSION_HEADERS

MAX_LINKS = 512  # of one prompt; what comes later says little about where to go
_TEXT_LINK = 2048  # characters of a raw prompt that make a link
_MARKS = frozenset({"cache_control"})  # they move from turn to turn and are no part of the prompt
Link = tuple[str, int]  # digest of the prompt up to its end, bytes that it adds


@dataclass(frozen=True)
class Affinity:
    """key: the conversation, None where a request belongs to none. chain: the links of its prompt."""

    key: str | None = None
    chain: tuple[Link, ...] = ()


def affinity_of(headers: Mapping[str, str], body: Mapping[str, Any] | None) -> Affinity:
    """The affinity of a request: its client's session header, else `prompt_cache_key`, else the conversation's id, else a digest of
    the system text and the first user message. headers: by lower-case name. body: a parsed object, not yet checked, if any.
    """
    body = body or {}
    parts, first_user = _parts(body)
    chain = _chain(parts)
    named = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None) or _named(body)
    if named is not None:
        return Affinity(f"name {named}", chain)
    if first_user is None or first_user >= len(chain):
        return Affinity(None, chain)
    return Affinity(f"text {chain[first_user][0]}", chain)


def _named(body: Mapping[str, Any]) -> str | None:
    metadata = body.get("metadata")
    conversation = body.get("conversation")
    names = [
        body.get("prompt_cache_key"),
        conversation.get("id") if isinstance(conversation, Mapping) else conversation,
        metadata.get("user_id") if isinstance(metadata, Mapping) else None,
    ]
    return next((name for name in names if isinstance(name, str) and name), None)


def _parts(body: Mapping[str, Any]) -> tuple[list[Any], int | None]:
    """(what each link is made of, the number of the one with the first user message)."""
    messages = next((body[name] for name in ("messages", "input") if isinstance(body.get(name), list)), None)
    if messages is None and isinstance(body.get("input"), str):
        messages = [{"role": "user", "content": body["input"]}]
    if messages is None:
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            return [], None
        return [prompt[at : at + _TEXT_LINK] for at in range(0, len(prompt), _TEXT_LINK)], 0
    head = [body.get("tools"), _system(body.get("system")), body.get("instructions")]
    first = next(
        (at for at, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "user"), None
    )
    return [head, *map(_system_message, messages)], None if first is None else first + 1


def _system(system: Any) -> Any:
    """A system text as it reaches the prompt: Claude Code's line with a number that changes every time does not."""
    if isinstance(system, str):
        return without_nonce(system)
    if isinstance(system, list):
        return [part | {"text": without_nonce(part["text"])} if _is_text(part) else part for part in system]
    return system


def _system_message(message: Any) -> Any:
    if isinstance(message, Mapping) and message.get("role") == "system":
        return {**message, "content": _system(message.get("content"))}
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _chain(parts: Sequence[Any]) -> tuple[Link, ...]:
    links, digest = [], b""
    for part in parts[:MAX_LINKS]:
        said = json.dumps(_bare(part), sort_keys=True, ensure_ascii=True).encode()
        digest = hashlib.blake2b(digest + said, digest_size=8).digest()
        links.append((digest.hex(), len(said)))
    return tuple(links)


def _bare(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _bare(inner) for key, inner in value.items() if key not in _MARKS}
    if isinstance(value, list):
        return [_bare(inner) for inner in value]
    return value


@dataclass
class Answered:
    """The links of what a replica has answered, the latest `most`: what it reports as the top of its prefix tree."""

    most: int = 2048
    _links: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def add(self, chain: Iterable[Link]) -> None:
        """One prompt. Its first links are the latest used: all that comes later is of no use without them."""
        for digest, _ in reversed(list(chain)):
            self._links[digest] = None
            self._links.move_to_end(digest)
        while len(self._links) > self.most:
            self._links.popitem(last=False)

    def digests(self) -> list[str]:
        """The latest last."""
        return list(self._links)
