"""Text that prompts are cut from: a file, or the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ninfer_jax.files import read_text
from ninfer_jax.text import Tokenizer

# Tables rather than text (encodings), tests, and two programs with resources of their own.
_LEFT_OUT = {"encodings", "ensurepip", "idlelib", "lib2to3", "test", "turtledemo"}


@dataclass(frozen=True)
class Corpus:
    """name: what the text is, with enough of its identity to recognise it. ids: its tokens, as many as were asked for or
    as there are."""

    name: str
    ids: list[int]

    def texts(self, runs: int, slots: int, length: int) -> list[list[list[int]]]:
        """Prompts `[runs][slots]` of `length` tokens each, one after another in the text: no two share a token's place.
        ValueError, with the number of tokens needed, where the text is too short."""
        need = runs * slots * length
        if need > len(self.ids):
            raise ValueError(
                f"corpus: {need:,} tokens are needed ({runs} runs x {slots} slots x {length:,}), "
                f"{self.name} has {len(self.ids):,}; give a longer --corpus, or take fewer --repeats or a smaller depth"
            )
        at = iter(range(0, need, length))
        return [[self.ids[(start := next(at)) : start + length] for _ in range(slots)] for _ in range(runs)]


def open_corpus(tokenizer: Tokenizer, path: Path | None, need: int, tell: Callable[[int, int], None]) -> Corpus:
    """The tokens of the file, or of the standard library where `path` is None; no more of the latter than `need`, rounded
    up to a module. tell: called with (tokens so far, need). ValueError for a file that is no UTF-8 text."""
    if path is None:
        return _standard_library(tokenizer, need, tell)
    text = read_text(path, label="--corpus ")
    ids = tokenizer.encode(text)
    tell(len(ids), len(ids))
    return Corpus(f"{path.name} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})", ids)


def standard_library_texts() -> Iterator[tuple[str, str]]:
    """(path below the library, text) of each module: single modules first, then packages, both by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (p.relative_to(root) for p in root.rglob("*.py"))
    for file in sorted((f for f in files if _is_text(f)), key=lambda f: (len(f.parts) > 1, f.as_posix())):
        try:
            yield file.as_posix(), (root / file).read_text("utf-8")
        except UnicodeDecodeError:  # a few modules declare another encoding
            continue


def _is_text(file: Path) -> bool:
    top = file.parts[0].removesuffix(".py")
    return top in sys.stdlib_module_names and top not in _LEFT_OUT and not {"test", "tests"} & set(file.parts)


def _standard_library(tokenizer: Tokenizer, need: int, tell: Callable[[int, int], None]) -> Corpus:
    ids: list[int] = []
    for _, text in standard_library_texts():
        if len(ids) >= need:
            break
        ids += tokenizer.encode(text)
        tell(min(len(ids), need), need)
    return Corpus(f"standard library of Python {platform.python_version()}", ids)
