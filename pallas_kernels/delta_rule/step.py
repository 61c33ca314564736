"""One transition of the delta rule inside a kernel: the arithmetic that decode and fold share to the last bit.

Per value head, with S `[key_dim, value_dim]` in registers (Gated Delta Networks, Yang et al. 2024, eq. 10):
    r = S^T k;  u = beta (v - decay r);  S <- decay S + k u^T
A drafted row is verified by one kernel and its accepted transition replayed by another, later. Plain decoding and
drafting agree only if both round every number alike, so nothing about that is left to a compiler:

- S is held as chunks `[WARPS, value_dim]`. A sum over key_dim is a chain of multiply-adds over the chunks, in order,
  then one sum over the rows of a chunk. A chunk has one row a warp, so a thread adds no two rows of it itself.
- Every product that an addition follows is a PTX instruction with its rounding written out (`mul.rn`, `fma.rn`), which
  neither LLVM nor ptxas fuses, splits or reorders. Interpreted, a product passes through `rounded` to the same end
  (two roundings where the GPU has one: the same bits in both kernels, not the same bits as on a GPU).
- Both kernels run `WARPS` warps a block on the same shapes, so that the sum over a chunk has one tree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.elementary import rounded

WARPS = 8

Chunks = tuple[jax.Array, ...]


def check_head(op: str, key_dim: int, value_dim: int) -> None:
    """ValueError unless a head's state can be held by a block."""
    for name, size in (("key_dim", key_dim), ("value_dim", value_dim)):
        if not launch.is_power_of_two(size) or not 32 <= size <= 256:
            raise ValueError(f"{op}: recurrent has {name} {size}, a power of two from 32 to 256 is needed")


def product(a: Any, b: Any, interpret: bool) -> jax.Array:
    """a * b, rounded to float32 before anything is added to it; shapes broadcast."""
    a, b = jnp.broadcast_arrays(a, b)
    return launch.packed("mul.rn.f32 $0, $1, $2;", _product, a, b, dtype=jnp.float32, interpret=interpret, pack=1)


def multiply_add(a: Any, b: Any, c: Any, interpret: bool) -> jax.Array:
    """a * b + c, on a GPU with one rounding; shapes broadcast."""
    a, b, c = jnp.broadcast_arrays(a, b, c)

    def twin(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return _product(a, b) + c

    return launch.packed("fma.rn.f32 $0, $1, $2, $3;", twin, a, b, c, dtype=jnp.float32, interpret=interpret, pack=1)


def load_state(ref: Any, slot: Any, head: Any) -> Chunks:
    """S of one head from float32 `[slots, value_heads, key_dim, value_dim]`."""
    key_dim, value_dim = ref.shape[2:]
    return tuple(launch.load(ref, (slot, head, pl.ds(at, WARPS), pl.ds(0, value_dim))) for at in range(0, key_dim, WARPS))


def store_state(ref: Any, slot: Any, head: Any, state: Chunks) -> None:
    """`state` to where `load_state` has it from."""
    for i, chunk in enumerate(state):
        launch.store(ref, (slot, head, pl.ds(i * WARPS, WARPS), pl.ds(0, chunk.shape[1])), chunk)


def columns(x: jax.Array, value_dim: int) -> Chunks:
    """x `[key_dim]` repeated along value_dim, chunked as the state is; the repetition takes no registers."""
    wide = jnp.broadcast_to(x[:, None], (x.shape[0], value_dim))
    return tuple(jax.lax.split(wide, (WARPS,) * (x.shape[0] // WARPS), axis=0))


def column_pair(pair: jax.Array, value_dim: int) -> tuple[Chunks, Chunks]:
    """`columns` of both rows of `[2, key_dim]`."""
    key_dim = pair.shape[1]
    # Repeated as one array, so that q and k of a column lie in one thread, and split after that.
    wide = jnp.broadcast_to(pair[:, :, None], (2, key_dim, value_dim))
    halves = [half.reshape(key_dim, value_dim) for half in jax.lax.split(wide, (1, 1), axis=0)]
    first, second = (tuple(jax.lax.split(half, (WARPS,) * (key_dim // WARPS), axis=0)) for half in halves)
    return first, second


def read_out(state: Chunks, x: Chunks, interpret: bool) -> jax.Array:
    """S^T x `[value_dim]`, x from `columns`."""
    # A chain over the chunks first, within threads; only its end crosses them.
    total = product(state[0], x[0], interpret)
    for s, column in zip(state[1:], x[1:], strict=True):
        total = multiply_add(s, column, total, interpret)
    return jnp.sum(total, axis=0)


def update(state: Chunks, k: Chunks, v: jax.Array, decay: jax.Array, beta: jax.Array, interpret: bool) -> jax.Array:
    """u `[value_dim]`: what the transition writes along k. v `[value_dim]`, decay and beta scalars."""
    return beta * (v - product(decay, read_out(state, k, interpret), interpret))


def advance(state: Chunks, k: Chunks, u: jax.Array, decay: jax.Array, interpret: bool) -> Chunks:
    """decay S + k u^T."""
    return tuple(multiply_add(decay, s, product(c, u[None], interpret), interpret) for s, c in zip(state, k, strict=True))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    result = a * b
    n = jax.lax.bitcast_convert_type(result, jnp.int32)
    # Of two consecutive integers one is even: a zero that the compiler does not see through.
    return rounded(result, n * (n + 1) & 1)
