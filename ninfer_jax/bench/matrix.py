"""The cells of a matrix, and the order that makes each engine once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from ninfer_jax.config import EngineConfig


@dataclass(frozen=True)
class Cell:
    """One measurement. In tokens: `depth` that fill the slot before anything is timed, then `prompt`, then `gen` generated,
    the prefill's own first token included. kv, draft, slots, context: the engine's, as in `EngineConfig`; context None is
    what the largest cell needs that goes with the same kv, draft and slots."""

    prompt: int
    gen: int
    depth: int
    kv: str
    draft: int
    slots: int
    context: int | None = None

    @property
    def need(self) -> int:
        """Tokens that one slot has to hold."""
        return self.depth + self.prompt + self.gen

    def __str__(self) -> str:
        words = f"prompt {self.prompt}, gen {self.gen}, depth {self.depth}, kv {self.kv}, K {self.draft}, slots {self.slots}"
        return words if self.context is None else f"{words}, context {self.context}"


@dataclass(frozen=True)
class EngineCells:
    """Cells that one engine serves: they agree in kv, draft, slots and the context asked for."""

    kv: str
    draft: int
    slots: int
    context: int | None
    cells: tuple[Cell, ...]

    @property
    def capacity(self) -> int:
        """Tokens of a slot: as asked for, else what the largest of the cells needs."""
        return self.context or max(cell.need for cell in self.cells)


def cells(
    prompts: Sequence[int],
    gens: Sequence[int],
    depths: Sequence[int],
    kvs: Sequence[str],
    drafts: Sequence[int],
    slots: Sequence[int],
    contexts: Sequence[int | None],
    chunk: int,
) -> list[Cell]:
    """All combinations, each once. chunk: tokens of a prefill call, of which every depth must be a multiple, because a
    call that held the end of the depth and the start of the prompt could not be timed apart. ValueError names the field.
    """
    for field, values, least in (("prompt", prompts, 1), ("gen", gens, 1), ("depth", depths, 0)):
        for value in values:
            if value < least:
                raise ValueError(f"{field} is {value}, it must be at least {least}")
    for depth in depths:
        if depth % chunk:
            near = max(1, round(depth / chunk)) * chunk
            raise ValueError(f"depth is {depth}, it must be a multiple of the prefill chunk {chunk}; the nearest is {near}")
    for kv, draft, count, context in product(kvs, drafts, slots, contexts):
        EngineConfig(kv=kv, draft=draft, slots=count, context=context)  # a name or number that no engine takes is a typing mistake
    every = product(kvs, drafts, slots, contexts, depths, prompts, gens)
    return list(dict.fromkeys(Cell(p, g, d, kv, k, s, c) for kv, k, s, c, d, p, g in every))


def by_engine(wanted: Sequence[Cell], cost: Callable[[EngineCells], int]) -> list[EngineCells]:
    """The cells grouped by engine; their order within a group is kept. cost: bytes that an engine's pages take, about.

    Cheap engines first: a device tells only the peak of the whole process, which an engine has to itself as long as those
    before it took less.
    """
    groups: dict[tuple[str, int, int, int | None], list[Cell]] = {}
    for cell in wanted:
        groups.setdefault((cell.kv, cell.draft, cell.slots, cell.context), []).append(cell)
    return sorted((EngineCells(*key, tuple(own)) for key, own in groups.items()), key=cost)
