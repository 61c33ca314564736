"""The output head: rows times the vocabulary matrix, leaving candidates instead of logits.

Each block of columns writes its `keep` largest logits per row with their ids, so that 16 rows over 248,320 columns
leave 1/16 or less of the logits; a second, small step picks the best of all. Greedy needs one a block. For top-k the
pick is exact unless some block hides a candidate: that is only possible where all `keep` of a block are among the
result, and then the whole logits are computed after all (the same kernel, wider output). Which of the two happened
changes no result.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.matmul import kernel
from pallas_kernels.matmul.quantised import QuantisedWeight

BLOCK = 128
KEEP = 8  # of a block's 128 columns, for top-k
MOST = 64  # largest k


@functools.partial(jax.jit, static_argnames=("keep", "valid", "eps", "interpret"))
def block_candidates(
    x: jax.Array,
    weight: QuantisedWeight,
    norm: jax.Array | None = None,
    *,
    keep: int,
    valid: int,
    eps: float = 1e-6,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The `keep` largest logits of each block of 128 columns, `[blocks, 16, keep]` float32, and their int32 ids.

    Falling order; equal logits by rising id. Columns from `valid` on count as -inf. x `[1..16, K]` bf16.
    """
    n = weight.shape[1]
    blocks = -(-n // BLOCK)
    operands = [a for a in (x, weight.words, weight.scales, weight.unit, norm) if a is not None]
    out = [
        jax.ShapeDtypeStruct((blocks, kernel.ROWS, keep), jnp.float32),
        jax.ShapeDtypeStruct((blocks, kernel.ROWS, keep), jnp.int32),
    ]
    body = functools.partial(
        _candidates_kernel,
        shape=kernel.DecodeShape(x.shape[0], weight.shape[0], n, weight.bits, weight.group, BLOCK, interpret),
        normed=norm is not None,
        eps=eps,
        keep=keep,
        valid=valid,
    )
    return launch.launch(
        body,
        name=f"w{weight.bits}_head_{keep}",
        grid=(blocks,),
        in_specs=[launch.whole(a) for a in operands],
        out_specs=[launch.whole(o) for o in out],
        out_shape=out,
        num_warps=8,
        num_stages=2 if weight.group == 128 else 3,
        interpret=interpret,
    )(*operands)


def _candidates_kernel(*refs: Any, shape: kernel.DecodeShape, normed: bool, eps: float, keep: int, valid: int) -> None:
    """The `keep` largest logits of one block of columns, for all rows."""
    x_ref, *rest = refs
    weight_refs, rest = rest[:3], rest[3:]
    norm_ref = rest.pop(0) if normed else None
    values_ref, ids_ref = rest
    block = pl.program_id(0)
    at = block * BLOCK
    (logits,) = kernel.accumulate(x_ref, weight_refs, norm_ref, (at,), shape)
    if normed:
        logits = logits * kernel.inverse_rms(x_ref, eps, shape)[:, None]
    # Padding and ids that no token has cannot win.
    ids = at + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where(ids < valid, logits, -jnp.inf)
    # The largest, written and taken out, `keep` times over.
    rows = pl.ds(0, kernel.ROWS)
    for i in range(keep):
        best = jnp.max(logits, axis=1)
        # The least id among equals, as a stable sort has it.
        first = jnp.min(jnp.where(logits == best[:, None], ids, jnp.iinfo(jnp.int32).max), axis=1)
        launch.store(values_ref, (block, rows, i), best)
        launch.store(ids_ref, (block, rows, i), first)
        logits = jnp.where(ids == first[:, None], -jnp.inf, logits)


def argmax(
    x: jax.Array, weight: QuantisedWeight, norm: jax.Array | None = None, *, valid: int, eps: float = 1e-6, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Id int32 and logit float32 of each row's largest logit among the first `valid` columns; the least id of equals."""
    values, ids = block_candidates(x, weight, norm, keep=1, valid=valid, eps=eps, interpret=interpret)
    values, ids = values[:, : x.shape[0], 0], ids[:, : x.shape[0], 0]
    # Blocks come in rising order of ids, so the first block of equals holds the least id.
    block = jnp.argmax(values, axis=0)[None]
    return jnp.take_along_axis(ids, block, 0)[0], jnp.take_along_axis(values, block, 0)[0]


def top_k(
    x: jax.Array,
    weight: QuantisedWeight,
    k: int,
    norm: jax.Array | None = None,
    *,
    valid: int,
    eps: float = 1e-6,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The `k` <= 64 largest logits of each row `[rows, k]` float32, falling, and their int32 ids.

    Equal logits by rising id. ValueError for another k.
    """
    if not 1 <= k <= min(MOST, valid):
        raise ValueError(f"top_k: k {k} must be from 1 to {min(MOST, valid)}")
    find = functools.partial(block_candidates, x, weight, norm, valid=valid, eps=eps, interpret=interpret)
    # Small vocabularies have few blocks: together they must keep at least k.
    keep = max(min(KEEP, _next_power(k)), _next_power(-(-k // -(-weight.shape[1] // BLOCK))))
    values, ids = (c[:, : x.shape[0]] for c in find(keep=keep))
    best, best_ids = _pick(values, ids, k)
    # A block may hide something only where its smallest survivor would itself be in the result.
    full = jnp.any(values[:, :, -1] >= best[None, :, -1]) if keep < k else jnp.zeros((), bool)

    def everything() -> tuple[jax.Array, jax.Array]:
        logits = kernel.decode(x, weight, norm, eps=eps, out_dtype=jnp.float32, interpret=interpret)
        found, at = jax.lax.top_k(logits[:, :valid], k)
        return found, at.astype(jnp.int32)

    return jax.lax.cond(full, everything, lambda: (best, best_ids))


def _next_power(n: int) -> int:
    """The least power of two from n on."""
    return 1 << (n - 1).bit_length()


def _pick(values: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Best k of `[blocks, rows, keep]`. Candidates are in rising order of ids among equals, and `top_k` is stable."""
    rows = values.shape[1]
    values, ids = (jnp.swapaxes(a, 0, 1).reshape(rows, -1) for a in (values, ids))
    best, at = jax.lax.top_k(values, k)
    return best, jnp.take_along_axis(ids, at, 1)
