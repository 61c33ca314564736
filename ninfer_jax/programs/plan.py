"""The plan of a device with what a compiler said of the programs, and the bytes of an engine's arrays."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax

from ninfer_jax.planning.budget import CONTEXT_ALLOWANCE
from ninfer_jax.planning.plan import Plan, with_contexts
from ninfer_jax.planning.sizes import Shape
from ninfer_jax.programs.card import Compilation
from ninfer_jax.programs.programs import Programs
from ninfer_jax.programs.setup import Setup
from ninfer_jax.state import State

ALLOWED = "allowance"  # what stands for the programs' names where none is compiled
# Temporaries of the programs that serve, before any is compiled (110 MB for the 27B at a prefill chunk of 1,024, compiled).
WORKSPACE_ALLOWANCE = 256 << 20


def make_plan(
    setup: Setup, target: str, card_bytes: int, compiled: Mapping[str, tuple[Compilation, int]] | None = None, kept: int = 0
) -> Plan:
    """compiled: each serving program's `Compilation` and the size of its executable; None takes `WORKSPACE_ALLOWANCE` for
    all, as "allowance". kept: host memory for prefixes."""
    programs = setup.programs()
    _, (parameters, state), _ = programs.source("decode_round")
    weights: collections.Counter = collections.Counter()
    for leaf, role in zip(parameters, programs.roles(), strict=True):
        weights[role] += nbytes(leaf)
    kv = kv_bytes(state)
    plan = Plan(
        target=target,
        card=card_bytes,
        weights=dict(weights.most_common()),
        kv=kv,
        state=sum(nbytes(x) for x in jax.tree.leaves(state)) - kv,
        staging=programs.staging_bytes,
        workspace={ALLOWED: WORKSPACE_ALLOWANCE}
        if compiled is None
        else {n: programs.workspace(n, compiled[n][0].workspace_bytes) for n in programs.serving},
        executables=sum(size for _, size in (compiled or {}).values()),
        allowance=CONTEXT_ALLOWANCE if setup.platform != "cpu" else 0,
        max_context={},
        kept=kept,
        page=programs.page_bytes,
        how=ALLOWED if compiled is None else "compiled",
    )
    return with_contexts(plan, setup.model, shape_in(setup))


def shape_in(setup: Setup) -> Shape:
    """The shape of a setup as plans have it."""
    shape, dtype = setup.shape, str(jax.numpy.dtype(setup.shape.dtype))
    pool = shape.pool_tokens
    return Shape(shape.context, shape.slots, shape.draft, shape.drafter, shape.kv, pool, setup.chunk, dtype, setup.recipe)


def resident_bytes(programs: Programs) -> int:
    """Weights, state and one snapshot of a slot, by their shapes: what an engine keeps on the device."""
    return sum(resident_parts(programs).values())


def resident_parts(programs: Programs) -> dict[str, int]:
    """Bytes of `resident_bytes`, by what they are."""
    _, (parameters, state), _ = programs.source("decode_round")
    kv, whole = kv_bytes(state), sum(nbytes(leaf) for leaf in jax.tree.leaves(state))
    weights = sum(nbytes(leaf) for leaf in jax.tree.leaves(parameters))
    return {"weights": weights, "KV pages": kv, "states": whole - kv, "snapshot": programs.staging_bytes}


def kv_bytes(state: State) -> int:
    """Bytes of all page pools, the MTP layer's among them."""
    return sum(nbytes(leaf) for leaf in jax.tree.leaves((state.kv, state.mtp_kv)))


def nbytes(leaf: Any) -> int:
    """Bytes of an array or of its description."""
    return leaf.size * leaf.dtype.itemsize
