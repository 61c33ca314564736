"""The bytes of one configuration, part by part, and where it is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_jax.config import ModelConfig
from ninfer_jax.planning import sizes
from ninfer_jax.planning.sizes import Shape
from ninfer_jax.planning.workspace import Workspace, workspace
from pallas_kernels import driver, targets

# The CUDA context with the modules of all programs loaded: an allowance, not measured on this engine.
CONTEXT_ALLOWANCE = 512 << 20
# Of what a driver says is free with a context there already: the programs' code (31 MB for the 27B, compiled), and its own buffers.
OUTSIDE = 64 << 20


@dataclass(frozen=True)
class Place:
    """A device. platform: "cpu" or "cuda". name: a card's, or what stands for it in messages. total: bytes that it has. free: bytes
    that weights, state and programs may take of them, None where nothing tells."""

    platform: str
    name: str
    free: int | None
    total: int = 0


def card(name: str, taken: int = 0, total: int | None = None) -> Place:
    """A card that need not be here, by its data sheet, with a CUDA context in it; taken: bytes that others hold. ValueError for a
    name that is not known."""
    total = targets.get(name).memory_bytes if total is None else total
    return Place("cuda", name, max(0, total - taken - CONTEXT_ALLOWANCE), total)


def card_here() -> Place | None:
    """The first visible card, by its driver's words, if it is one that this package compiles for; None without one."""
    kind, memory = driver.card_name(), driver.card_memory()
    name = None if kind is None else targets.of_device(kind)
    return None if name is None or memory is None else Place("cuda", name, max(0, memory[0] - OUTSIDE), memory[1])


@dataclass(frozen=True)
class Budget:
    """Bytes. weights by role, kv (page pools), state and staging (one slot's state on its way to the host) are exact, from shapes.
    workspace: what programs take beside them, recorded or modelled. shape: of what."""

    shape: Shape
    weights: Mapping[str, int]
    kv: int
    state: int
    staging: int
    workspace: Workspace

    @property
    def resident(self) -> int:
        """Weights, pages, states and one that is on its way."""
        return sum(self.weights.values()) + self.kv + self.state + self.staging

    @property
    def total(self) -> int:
        """All that an engine takes of what is free; a CUDA context is no part of it."""
        return self.resident + self.workspace.bytes + self.workspace.executables

    def parts(self) -> list[tuple[str, int, str]]:
        """(what, bytes, how known) of each part, in the order of a table."""
        rows = [(f"weights: {role}", count, "exact") for role, count in self.weights.items()]
        rows += [("KV pages", self.kv, "exact"), ("states, slots, sampling", self.state, "exact")]
        rows += [("one slot's state on its way", self.staging, "exact")]
        rows += [("workspace", self.workspace.bytes, self.workspace.how)]
        return rows + ([("executables", self.workspace.executables, self.workspace.how)] if self.workspace.executables else [])

    def json(self) -> dict[str, Any]:
        """The same as JSON, with what it was made of."""
        return {
            "weights_bytes": sum(self.weights.values()),
            "weights_by_role": dict(self.weights),
            "kv_bytes": self.kv,
            "state_bytes": self.state,
            "staging_bytes": self.staging,
            "workspace_bytes": self.workspace.bytes,
            "workspace_how": f"{self.workspace.how}: {self.workspace.note}",
            "executables_bytes": self.workspace.executables,
        }


def budget(model: ModelConfig, shape: Shape, platform: str) -> Budget:
    """Bytes of a configuration of a model. ValueError for a KV format that does not go with it."""
    return Budget(
        shape,
        sizes.weights(model, shape),
        sizes.pages(model, shape),
        sizes.state(model, shape),
        sizes.staging(model, shape),
        workspace(model, shape, platform),
    )
