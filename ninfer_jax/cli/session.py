"""`generate --session FILE`: a conversation that goes on from one command to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ninfer_jax.engine import Completion, Engine
from ninfer_jax.engine.requests import Requests
from ninfer_jax.engine.sessions import conversation_in
from ninfer_jax.files import new_file


class Session:
    """The conversation of `path`: messages, or token ids; None where it begins. FileError for a file that holds none."""

    def __init__(self, path: Path):
        self._path = path
        self._before: list[Any] | None = conversation_in(path) if path.exists() else None
        if self._before is None:
            new_file(path, label="--session ")

    def with_more(self, given: str | list, requests: Requests) -> str | list:
        """The whole prompt; ValueError where what is given is of another kind than what was before."""
        if self._before is None:
            return given
        messages = isinstance(given, list) and bool(given) and isinstance(given[0], dict)
        if messages != isinstance(self._before[0], dict):
            holds, give = ("token ids", "--prompt, --tokens or -") if messages else ("messages", "--messages")
            raise ValueError(f"--session {self._path} holds {holds}: go on with {give}")
        return [*self._before, *(given if messages else requests.prompt_ids(given, {}))]

    def open(self, engine: Engine) -> None:
        """Give the engine what needs no prefill; FileError where it is another model's."""
        if self._before is not None:
            engine.resume(self._path)

    def save(self, engine: Engine, given: str | list, completion: Completion) -> None:
        """Write the conversation with its answer."""
        if isinstance(given, list) and isinstance(given[0], dict):
            reasoning = {"reasoning_content": completion.reasoning} if completion.reasoning else {}
            engine.save([*given, {"role": "assistant", "content": completion.text} | reasoning], self._path)
            return
        said = completion.tokens
        if completion.finish_reason == "stop" and said[-1] in engine.defaults.eos_ids:
            said = said[:-1]
        engine.save(engine.prompt_ids(given) + said, self._path)
