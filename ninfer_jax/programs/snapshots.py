"""Movement of one sequence's state and of single pages in and out of `State`: fixed shapes, whatever the sequence's length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ninfer_jax.config import ModelConfig
from ninfer_jax.programs.pending import settle
from ninfer_jax.state import State, StateShape, state_struct


class Snapshot(NamedTuple):
    """The state of a slot at exactly `length` tokens, nothing waiting; the pages apart.

    recurrent float32 `[value_heads, key_dim, value_dim]` and conv `[width - 1, channels]`, one each a GDN layer; hidden
    `[hidden]`, length and rope_delta int32 scalars, linked bool scalar: as in `Slots`. What belongs to a request and not to its
    tokens (settings, counts, seeds) is not in it.
    """

    recurrent: tuple[jax.Array, ...]
    conv: tuple[jax.Array, ...]
    hidden: jax.Array
    length: jax.Array
    rope_delta: jax.Array
    linked: jax.Array


def snapshot_struct(model: ModelConfig, shape: StateShape) -> Snapshot:
    """A snapshot as `jax.ShapeDtypeStruct` leaves."""
    state = state_struct(model, shape)

    def one(leaf: Any, rows: int | None = None) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape[1:] if rows is None else (rows, *leaf.shape[2:]), leaf.dtype)

    slots = state.slots
    window = model.conv_width - 1
    return Snapshot(
        tuple(map(one, state.recurrent)),
        tuple(one(leaf, window) for leaf in state.conv),
        *map(one, (slots.hidden, slots.length, slots.rope_delta, slots.linked)),
    )


def snapshot(state: State, slot: jax.Array, width: int) -> tuple[State, Snapshot]:
    """The snapshot of `slot`; the state with nothing waiting there any more. width: taps of the convolution."""
    state = settle(state, width, slot)
    slots = state.slots
    return state, Snapshot(
        tuple(leaf[slot] for leaf in state.recurrent),
        tuple(leaf[slot, : width - 1] for leaf in state.conv),
        slots.hidden[slot],
        slots.length[slot],
        slots.rope_delta[slot],
        slots.linked[slot],
    )


def restore(state: State, slot: jax.Array, given: Snapshot, tokens: jax.Array) -> State:
    """`state` with `slot` standing where `given` was taken. Its table has the pages of those tokens; tokens int32 `[context]`:
    their ids, then anything. Settings, and counts of what was emitted, stay."""
    slots, rows = state.slots, given.conv[0].shape[0] if given.conv else 0

    def put(array: jax.Array, value: jax.Array | int) -> jax.Array:
        return array.at[slot].set(value)

    # Penalties ask which ids are among them.
    there = jnp.arange(len(tokens)) < given.length
    seen = jnp.zeros_like(state.sampling.in_prompt[slot]).at[tokens].max(there)
    history = state.history
    pending = state.pending._replace(count=put(state.pending.count, 0), start=put(state.pending.start, 0))
    return state._replace(
        recurrent=tuple(map(put, state.recurrent, given.recurrent)),
        conv=tuple(into.at[slot, :rows].set(window) for into, window in zip(state.conv, given.conv, strict=True)),
        slots=slots._replace(
            length=put(slots.length, given.length),
            hidden=put(slots.hidden, given.hidden),
            rope_delta=put(slots.rope_delta, given.rope_delta),
            linked=put(slots.linked, given.linked),
        ),
        sampling=state.sampling._replace(in_prompt=put(state.sampling.in_prompt, seen)),
        pending=pending,
        history=None if history is None else put(history, tokens),
    )


def page_bytes(state: State) -> int:
    """Bytes of one page in all pools together, the MTP layer's among them."""
    return sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in _pools(state))


def read_page(state: State, page: jax.Array) -> jax.Array:
    """All that the pools hold of `page`, uint8 `[page_bytes]`: layer after layer, the MTP layer last."""
    return jnp.concatenate([_bytes(leaf[page]) for leaf in _pools(state)])


def write_page(state: State, page: jax.Array, data: jax.Array) -> State:
    """`state` with `data`, as `read_page` gave it, in `page`."""
    pools, at = [], 0
    for leaf in _pools(state):
        size = leaf.size // leaf.shape[0] * leaf.dtype.itemsize
        pools.append(leaf.at[page].set(_from_bytes(data[at : at + size], leaf.shape[1:], leaf.dtype)))
        at += size
    return _with_pools(state, pools)


def copy_page(state: State, source: jax.Array, target: jax.Array) -> State:
    """`state` with the contents of page `source` in page `target` too."""
    return _with_pools(state, [leaf.at[target].set(leaf[source]) for leaf in _pools(state)])


def _pools(state: State) -> list[jax.Array]:
    return jax.tree.leaves((state.kv, state.mtp_kv))


def _with_pools(state: State, leaves: Sequence[jax.Array]) -> State:
    kv, mtp_kv = jax.tree.unflatten(jax.tree.structure((state.kv, state.mtp_kv)), leaves)
    return state._replace(kv=kv, mtp_kv=mtp_kv)


def _bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _from_bytes(data: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    width = () if dtype.itemsize == 1 else (dtype.itemsize,)
    return jax.lax.bitcast_convert_type(data.reshape(*shape, *width), dtype)
