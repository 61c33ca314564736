"""The text side of a model directory: its tokenizer, its chat template and its sampling defaults, fit for its head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ninfer_jax.files import kind_of, read_object
from ninfer_jax.text.generation_config import GenerationDefaults
from ninfer_jax.text.template import ChatTemplate
from ninfer_jax.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """In the place of a tokenizer where only token ids go in and out: every row of the output head is an id, and none has
    text. ValueError for whatever would need one."""

    has_text = False

    def __init__(self, vocab_size: int):
        """vocab_size: rows of the output head."""
        self.vocab_size = vocab_size
        self.control_tokens: dict[str, int] = {}
        self.special_ids: frozenset[int] = frozenset()
        self.notes: tuple[str, ...] = ()

    def encode(self, text: str, allow_special: bool = False, plain_spans: object = ()) -> list[int]:
        raise ValueError("text: there is no tokenizer (tokenizer=None, --no-tokenizer): give token ids")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        raise ValueError("decode: there is no tokenizer (tokenizer=None, --no-tokenizer): token ids have no text")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        return b""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def token_id(self, token: str) -> int:
        raise ValueError(f"token {token!r}: there is no tokenizer (tokenizer=None, --no-tokenizer)")


@dataclass(frozen=True)
class CheckpointText:
    """template: None where the checkpoint has none. notes: a line for each setting of its files that has no effect here."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults

    @property
    def notes(self) -> tuple[str, ...]:
        return self.tokenizer.notes + self.defaults.notes


def open_text(path: Path, rows: int, tokenizer: str | None = "auto") -> CheckpointText:
    """rows: of the output head. tokenizer: "auto" for that of the directory, None for token ids alone, with whatever EOS the
    directory names, or none. ValueError names the file that is missing, damaged, or names ids that the model does not have."""
    if tokenizer is None:
        defaults = replace(GenerationDefaults.from_dir(path, needs_eos=False), stop=())
        found = CheckpointText(NoTokenizer(rows), None, defaults)
    else:
        template = ChatTemplate.from_dir(path) if _has_template(path) else None
        found = CheckpointText(Tokenizer.from_dir(path), template, GenerationDefaults.from_dir(path))
    ids, where = found.tokenizer.vocab_size, "tokenizer.json" if found.tokenizer.has_text else "config.json"
    if ids > rows:
        raise ValueError(f"{path}: tokenizer.json has {ids} ids, config.json a vocab_size of {rows}")
    if max(found.defaults.eos_ids, default=0) >= ids:
        raise ValueError(f"{path}: eos_token_id {max(found.defaults.eos_ids)} is no token, {where} has {ids} ids")
    return found


def _has_template(path: Path) -> bool:
    if kind_of(path / "chat_template.jinja") is not None:
        return True
    return read_object(path / "tokenizer_config.json").get("chat_template") is not None
