"""Everything that changes while an engine runs, as one pytree of fixed shapes, donated to every program.

Each array has the slot axis first, except the page pools, which all slots share through their block tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.config import MAX_CONTEXT, PAGE, EngineConfig, ModelConfig
from ninfer_jax.decoding.masks import Masks, masks_struct
from ninfer_jax.decoding.sampling import SamplingState, sampling_struct
from pallas_kernels.delta_rule import Layout, ring_rows
from pallas_kernels.kv_pages import KVPages, pages_struct


class Slots(NamedTuple):
    """The place where each sequence stands. `slots` = S, `draft` = K.

    table int32 `[S, pages_per_slot]`: block tables, 0 where no page is owned.
    length int32 `[S]`: tokens that the recurrent states and pages have consumed.
    token int32 `[S]`: the last emitted token, not consumed yet.
    drafts int32 `[S, K]`: proposals for the tokens after it, -1 where there is none.
    parents int32 `[S, K + 1]`: of each row of the next round the row that its token comes after; -1 for the first, whose token is
        not a draft. Today always a chain: row - 1.
    hidden `[S, hidden]`: final-normed hidden of the last token of the prompt so far; the first token is drawn from it.
    linked bool `[S]`: that is the token at `length` - 1, and the MTP layer's entry there waits for the token after it.
    active bool `[S]`: takes part in decode rounds.
    left int32 `[S]`: tokens that may still be emitted.
    rope_delta int32 `[S]`: RoPE position minus cache position, 0 for text.
    """

    table: jax.Array
    length: jax.Array
    token: jax.Array
    drafts: jax.Array
    parents: jax.Array
    hidden: jax.Array
    linked: jax.Array
    active: jax.Array
    left: jax.Array
    rope_delta: jax.Array


class Pending(NamedTuple):
    """Rows of the last round that were accepted and enter the recurrent states with the next one (R = K + 1 rows a round).

    count int32 `[S]`: how many. start int32 `[S]`: where they start in the rings, of `ring_rows(R, width)` rows: the row of
    `records` with the first of them, and of `State.conv` with the first of the width - 1 raw inputs before it.
    records float32 `[S, ring, columns]` (`delta_rule.Layout`), one a GDN layer.
    """

    count: jax.Array
    start: jax.Array
    records: tuple[jax.Array, ...]


class State(NamedTuple):
    """kv: page pools, one an attention layer. mtp_kv: the MTP layer's, or None. recurrent float32 `[S, value_heads,
    key_dim, value_dim]` and conv `[S, ring, channels]` (raw convolution inputs), one each a GDN layer; the states lack the
    rows that `pending` counts. Where none wait and start is 0, the first width - 1 rows of conv are the window of the
    convolution, oldest first. masks: of slots with a grammar, for their next draw. history int32 `[S, context]`: ids of the
    tokens consumed and, in an active slot, of the last emitted, where drafts are looked up in them; else None.
    """

    kv: tuple[KVPages, ...]
    mtp_kv: KVPages | None
    recurrent: tuple[jax.Array, ...]
    conv: tuple[jax.Array, ...]
    slots: Slots
    sampling: SamplingState
    pending: Pending
    masks: Masks
    history: jax.Array | None = None


class StateShape(NamedTuple):
    """The numbers that fix the shapes of a `State`, resolved from both configurations."""

    slots: int
    draft: int
    context: int  # tokens a slot may hold
    pages: int  # in each pool, the ownerless page 0 included
    kv: str
    dtype: jnp.dtype
    drafter: str = "none"  # "none" exactly where draft is 0

    @property
    def mtp(self) -> bool:
        """Whether the MTP head drafts."""
        return "mtp" in self.drafter

    @property
    def lookup(self) -> bool:
        """Whether drafts are looked up in a sequence's own tokens."""
        return "lookup" in self.drafter

    @property
    def pages_per_slot(self) -> int:
        return -(-self.context // PAGE)

    @property
    def pool_tokens(self) -> int:
        """Tokens that all pages together hold."""
        return (self.pages - 1) * PAGE


def state_shape(model: ModelConfig, engine: EngineConfig, kv: str, dtype: jnp.dtype) -> StateShape:
    """Resolve capacities; ValueError when the context exceeds what the model was made for. What `planning.choose` left open is the
    least: one slot, no drafts, every slot its whole context."""
    limit = min(model.max_positions, MAX_CONTEXT)
    context = limit if engine.context is None else engine.context
    if context > model.max_positions:
        raise ValueError(f"context is {context}, the model's max_position_embeddings is {model.max_positions}")
    per_slot = -(-context // PAGE)
    slots = engine.slots or 1
    pooled = slots * per_slot if engine.pool is None else -(-engine.pool // PAGE)
    draft = 0 if engine.drafter == "none" else engine.draft or 0
    return StateShape(slots, draft, context, pooled + 1, kv, dtype, engine.drafter if draft else "none")


def state_struct(model: ModelConfig, shape: StateShape) -> State:
    """The state as `jax.ShapeDtypeStruct` leaves: for allocating, planning and lowering."""
    s, dtype = shape.slots, shape.dtype
    array: Any = jax.ShapeDtypeStruct

    def pool() -> KVPages:
        return pages_struct(shape.kv, shape.pages, model.kv_heads, model.head_dim)

    slots = Slots(
        table=array((s, shape.pages_per_slot), jnp.int32),
        length=array((s,), jnp.int32),
        token=array((s,), jnp.int32),
        drafts=array((s, shape.draft), jnp.int32),
        parents=array((s, shape.draft + 1), jnp.int32),
        hidden=array((s, model.hidden_size), dtype),
        linked=array((s,), jnp.bool_),
        active=array((s,), jnp.bool_),
        left=array((s,), jnp.int32),
        rope_delta=array((s,), jnp.int32),
    )
    heads = model.gdn_key_heads, model.gdn_value_heads, model.gdn_key_dim, model.gdn_value_dim
    matrix, ring = (s, *heads[1:]), ring_rows(shape.draft + 1, model.conv_width)
    record, number = array((s, ring, Layout(*heads).columns), jnp.float32), array((s,), jnp.int32)
    return State(
        kv=tuple(pool() for _ in model.attention_layers),
        mtp_kv=pool() if shape.mtp else None,
        recurrent=tuple(array(matrix, jnp.float32) for _ in model.gdn_layers),
        conv=tuple(array((s, ring, model.conv_channels), dtype) for _ in model.gdn_layers),
        slots=slots,
        sampling=sampling_struct(s, model.vocab_size),
        pending=Pending(number, number, tuple(record for _ in model.gdn_layers)),
        masks=masks_struct(s, shape.draft + 1, model.vocab_size),
        history=array((s, shape.context), jnp.int32) if shape.lookup else None,
    )


def allocate_state(model: ModelConfig, shape: StateShape) -> State:
    """A zeroed state: every slot empty, every page free."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state_struct(model, shape))
