"""A grammar as data: what a request says that its answer must follow."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True)
class Grammar:
    """Rules that an answer must follow; the makers in `ninfer_jax.text.grammar` check what they are given.

    kind: one of `KINDS`. source: the schema as JSON text, the pattern, or the Lark grammar. field: what errors call it.
    """

    kind: str
    source: str
    field: str = "grammar"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar: kind is {self.kind!r}, it must be one of {', '.join(KINDS)}")
