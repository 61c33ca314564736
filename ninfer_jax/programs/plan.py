"""The plan of where every byte of a card goes, before anything is loaded."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ninfer_jax.config import MAX_CONTEXT, PAGE, ModelConfig
from ninfer_jax.programs.card import Compilation
from ninfer_jax.programs.programs import Programs
from ninfer_jax.programs.setup import Setup
from ninfer_jax.state import State
from pallas_kernels.kv_codecs import FORMATS, bytes_per_vector, check_format

# The CUDA context, cuBLAS-free, with the modules of all programs loaded: an allowance, not measured on this engine.
CONTEXT_ALLOWANCE = 512 << 20
ALLOWED = "allowance"  # what stands for the programs' names where none is compiled
# Temporaries of the programs that serve, before any is compiled (110 MB for the 27B at a prefill chunk of 1,024, compiled).
WORKSPACE_ALLOWANCE = 256 << 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes. weights: by role. kv: page pools, the MTP layer's included. state: recurrent and convolution states, slots,
    sampling, token ids where drafts are looked up. staging: one slot's state on its way to the host or back. workspace:
    temporaries and results that reuse nothing, by program; one program runs at a time, so the largest counts. executables:
    serialised sizes. All but `allowance` come from the compiler or from array shapes. kept, page: of host memory, the most that
    prefixes are kept in, and of one page there; of `total` they are no part.
    """

    target: str
    card: int
    weights: Mapping[str, int]
    kv: int
    state: int
    staging: int
    workspace: Mapping[str, int]
    executables: int
    allowance: int
    max_context: Mapping[str, int]
    kept: int = 0
    page: int = 0

    @property
    def resident(self) -> int:
        """Weights, pages, states and one that is on its way."""
        return sum(self.weights.values()) + self.kv + self.state + self.staging

    @property
    def total(self) -> int:
        return self.resident + max(self.workspace.values(), default=0) + self.executables + self.allowance

    @property
    def slack(self) -> int:
        return self.card - self.total

    @property
    def fits(self) -> bool:
        return self.slack >= 0

    def json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "weights_bytes": sum(self.weights.values()),
            "weights_by_role": dict(self.weights),
            "kv_bytes": self.kv,
            "state_bytes": self.state,
            "staging_bytes": self.staging,
            "workspace_bytes": max(self.workspace.values(), default=0),
            "workspace_by_program": dict(self.workspace),
            "executables_bytes": self.executables,
            "allowance_bytes": self.allowance,
            "total_bytes": self.total,
            "card_bytes": self.card,
            "slack_bytes": self.slack,
            "fits": self.fits,
            "max_context": dict(self.max_context),
            "host_cache_bytes": self.kept,
            "host_cache_bytes_per_checkpoint": self.staging,
            "host_cache_bytes_per_page": self.page,
        }


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
    )
    # Tokens kept for look-ups give way with the pages.
    left = plan.slack + plan.kv + (0 if state.history is None else nbytes(state.history))
    return dataclasses.replace(plan, max_context=max_contexts(setup, left))


def max_contexts(setup: Setup, left: int) -> dict[str, int]:
    """Tokens that each slot could hold in each KV format with `left` bytes for pages, and for the tokens' ids where drafts are
    looked up, and the rest unchanged; formats that do not go with the model are left out."""
    found = {}
    limit = min(setup.model.max_positions, MAX_CONTEXT)
    for format in FORMATS:
        try:
            check_format(format, setup.model.head_dim)
        except ValueError:
            continue
        a_page = page_bytes(setup.model, format, setup.shape.mtp) + (4 * PAGE if setup.shape.lookup else 0)
        pages = left // a_page - 1  # page 0 is nobody's
        found[format] = max(0, min(limit, pages // setup.shape.slots * PAGE))
    return found


def page_bytes(model: ModelConfig, format: str, mtp: bool) -> int:
    """Bytes of one page in all pools together."""
    vector = sum(bytes_per_vector(format, part, model.head_dim) for part in ("k", "v"))
    return vector * model.kv_heads * PAGE * (len(model.attention_layers) + mtp)


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
