"""A plan of where every byte of a device goes, before anything is loaded: from arithmetic alone, or with a compiler's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ninfer_jax.config import MAX_CONTEXT, PAGE, ModelConfig
from ninfer_jax.planning import sizes
from ninfer_jax.planning.budget import CONTEXT_ALLOWANCE
from ninfer_jax.planning.choose import Choice
from ninfer_jax.planning.sizes import Shape
from ninfer_jax.planning.workspace import recorded
from pallas_kernels.kv_formats import FORMATS, check_format


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes. weights: by role. kv: page pools, the MTP layer's included. state: recurrent and convolution states, slots,
    sampling, token ids where drafts are looked up. staging: one slot's state on its way to the host or back; all of them exact.
    workspace: temporaries and results that reuse nothing, by program; one program runs at a time, so the largest counts.
    executables: serialised sizes. how: of these two, how they are known: "compiled", "recorded", "modelled" or "allowance", and
    note more of it. taken: what others hold. kept, page: of host memory, the most that prefixes are kept in, and of one page
    there; of `total` they are no part.
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
    how: str = "compiled"
    note: str = ""
    taken: int = 0

    @property
    def resident(self) -> int:
        """Weights, pages, states and one that is on its way."""
        return sum(self.weights.values()) + self.kv + self.state + self.staging

    @property
    def total(self) -> int:
        return self.resident + max(self.workspace.values(), default=0) + self.executables + self.allowance

    @property
    def slack(self) -> int:
        return self.card - self.taken - self.total

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
            "workspace_how": f"{self.how}: {self.note}" if self.note else self.how,
            "executables_bytes": self.executables,
            "allowance_bytes": self.allowance,
            "total_bytes": self.total,
            "card_bytes": self.card,
            "taken_bytes": self.taken,
            "slack_bytes": self.slack,
            "fits": self.fits,
            "max_context": dict(self.max_context),
            "host_cache_bytes": self.kept,
            "host_cache_bytes_per_checkpoint": self.staging,
            "host_cache_bytes_per_page": self.page,
        }

    def parts(self) -> dict[str, int]:
        """Parts of the device in the order of a picture, without the part that is free."""
        parts = {f"weights: {role}": count for role, count in self.weights.items()}
        parts |= {"KV pages": self.kv, "states": self.state, "staging": self.staging}
        parts |= {"workspace": max(self.workspace.values(), default=0), "executables": self.executables}
        parts |= {"CUDA context": self.allowance, "others": self.taken}
        return {name: count for name, count in parts.items() if count}


def quick_plan(model: ModelConfig, choice: Choice, kept: int = 0, taken: int = 0) -> Plan:
    """The plan of a choice without a compiler: resident bytes are exact, workspace is recorded or modelled. kept: host memory for
    prefixes; taken: what others hold of a card."""
    made, place = choice.budget, choice.place
    row = recorded(model, made.shape) if place.platform != "cpu" else None
    plan = Plan(
        target=place.name,
        card=place.total or place.free or 0,
        weights=dict(made.weights),
        kv=made.kv,
        state=made.state,
        staging=made.staging,
        workspace=dict(row["workspace"]) if row else {made.workspace.how: made.workspace.bytes},
        executables=made.workspace.executables,
        allowance=CONTEXT_ALLOWANCE if place.platform != "cpu" else 0,
        max_context={},
        kept=kept,
        page=sizes.page(model, made.shape.kv, made.shape.mtp),
        how=made.workspace.how,
        note=made.workspace.note,
        taken=taken,
    )
    return with_contexts(plan, model, made.shape)


def with_contexts(plan: Plan, model: ModelConfig, shape: Shape) -> Plan:
    """The plan with the largest contexts that would fit."""
    # Tokens kept for look-ups give way with the pages.
    history = 4 * shape.slots * shape.context if shape.lookup else 0
    return dataclasses.replace(plan, max_context=max_contexts(model, shape, plan.slack + plan.kv + history))


def max_contexts(model: ModelConfig, shape: Shape, left: int) -> dict[str, int]:
    """Tokens that each slot could hold in each KV format with `left` bytes for pages, and for the tokens' ids where drafts are
    looked up, and the rest unchanged; formats that do not go with the model are left out."""
    found = {}
    limit = min(model.max_positions, MAX_CONTEXT)
    for format in FORMATS:
        try:
            check_format(format, model.head_dim)
        except ValueError:
            continue
        a_page = sizes.page(model, format, shape.mtp) + (4 * PAGE if shape.lookup else 0)
        pages = left // a_page - 1  # page 0 is nobody's
        found[format] = max(0, min(limit, pages // shape.slots * PAGE))
    return found
