"""From attention's projections to its inputs: norms, RoPE, the stored basis, keys and values encoded into their pages."""

from __future__ import annotations

import jax

from pallas_kernels import launch
from pallas_kernels.kv_append import cpu, kernel, reference
from pallas_kernels.kv_append.reference import Heads, gates, split_heads
from pallas_kernels.kv_codecs import check_format
from pallas_kernels.kv_pages import KVPages

__all__ = ["Heads", "attention_inputs", "gates", "split_heads"]


def attention_inputs(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    *,
    format: str,
    eps: float,
    impl: str = "auto",
) -> tuple[jax.Array, KVPages]:
    """Queries float32 `[tokens, query_heads, head_dim]`, and the pool with the tokens' keys and values (donate it).

    projected `[tokens, (2 query_heads + 2 kv_heads) head_dim]`: `[query | gate]` per query head, then all keys, then all
    values. q_norm, k_norm float32 `[head_dim]`: zero-centred RMS norms. cos, sin `[tokens, pairs]` in projected's dtype:
    RoPE of the leading dims, rotate-half. table int32 `[tokens, pages_per_slot]`, or `[pages_per_slot]` shared by all
    tokens; positions int32 `[tokens]` inside the slot; a negative one, or one beyond the table, goes to page 0, which
    nobody reads. Queries come scaled by head_dim^-1/2 and in the basis in which `format` stores keys (H64 of each 64 dims
    for rotated formats): what `decode_attention` and `prefill_attention` take.

    impl: `auto` is Pallas on a GPU and XLA on a CPU; `pallas`, `cpu` (compiled by LLVM) and `xla` insist. ValueError for
    shapes that do not fit.
    """
    _check(projected, q_norm, k_norm, cos, sin, pool, table, positions, format)
    arguments = (projected, q_norm, k_norm, cos, sin, pool, table, positions)

    def by(attend):
        return lambda *a: attend(*a, format=format, eps=eps)

    forms = {name: by(module.attention_inputs) for name, module in (("pallas", kernel), ("cpu", cpu), ("xla", reference))}
    return launch.by_platform(*arguments, **forms, impl=impl, unfit=_unfit(q_norm.shape[0], cos.shape[1]))


def _unfit(head_dim: int, pairs: int) -> str:
    """Why the kernel cannot take heads of this size, or nothing."""
    if launch.is_power_of_two(head_dim) and launch.is_power_of_two(pairs):
        return ""
    return f"attention_inputs: head_dim {head_dim} and rotary pairs {pairs} must be powers of two for the kernel"


def _check(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool: KVPages,
    table: jax.Array,
    positions: jax.Array,
    format: str,
) -> None:
    head_dim = q_norm.shape[-1]
    check_format(format, head_dim)
    kv_heads = jax.tree.leaves(pool.k)[0].shape[1]
    if projected.ndim != 2 or projected.shape[1] % (2 * head_dim) or projected.shape[1] <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"attention_inputs: projected {projected.shape} must be [tokens, (2 query_heads + 2 x {kv_heads}) x {head_dim}]"
        )
    tokens = projected.shape[0]
    for name, array, want in (
        ("q_norm", q_norm, (head_dim,)),
        ("k_norm", k_norm, (head_dim,)),
        ("positions", positions, (tokens,)),
    ):
        if array.shape != want:
            raise ValueError(f"attention_inputs: {name} {array.shape} must be {want}")
    if cos.shape != sin.shape or cos.shape[0] != tokens or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"attention_inputs: cos {cos.shape} and sin {sin.shape} must be [{tokens}, at most {head_dim // 2}]")
    if table.ndim not in (1, 2) or (table.ndim == 2 and table.shape[0] != tokens):
        raise ValueError(f"attention_inputs: table {table.shape} must be [pages_per_slot] or [{tokens}, pages_per_slot]")
