"""Seeded random weights, pages and states, drawn on the device in the formats that the programs read: no checkpoint needed.

Codes are uniform and scales such that a projection keeps the size of its input, so that everything stays finite through
64 layers. What a step costs does not depend on the numbers; what it says does, and means nothing here.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax.checkpoints import ParameterSpec
from ninfer_jax.model import TextModel, fill_arrays, parameters_of, split_model
from ninfer_jax.state import State

_SPREAD = {4: 4.6, 8: 73.0}  # standard deviation of uniform codes of so many bits
_SCALES = 85, 42  # of groups, in units of the column: middle and how far they go to either side


def _key(seed: int) -> jax.Array:
    """Of the device's own generator: fast to compile and to run; other devices draw other numbers from it."""
    return jax.random.key(seed, impl="rbg")


def draw_arrays(model: TextModel, seed: int, tell: Callable[[str], None] = lambda name: None) -> dict[str, jax.Array]:
    """Every array of the described `model` by path ("layers.3.mlp.down_proj.words"), parameter by parameter."""
    arrays: dict[str, jax.Array] = {}
    for parameter in parameters_of(model):
        # From the name and not the order, so that a model without its MTP head has the same weights.
        key = jax.random.fold_in(_key(seed), zlib.crc32(parameter.name.encode()))
        for field, array in _draw(parameter, key).items():
            arrays[f"{parameter.name}.{field}" if parameter.name else field] = array
        tell(parameter.name)
    return arrays


def parameters_from(model: TextModel, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """The leaves that the programs of `model` take, from `draw_arrays` of it or of a larger one."""
    _, described = split_model(model)
    filled: nnx.State = fill_arrays(described, dict(arrays))
    return jax.tree.leaves(filled)


def _draw(parameter: ParameterSpec, key: jax.Array) -> dict[str, jax.Array]:
    stored, tensor = parameter.stored, parameter.tensors[0]
    if stored is None:
        ((field, struct),) = parameter.arrays.items()
        return {field: _plain(key, _kind(tensor.name), struct.shape, str(struct.dtype))}
    inputs, outputs = tensor.shape[1], sum(t.shape[0] for t in parameter.tensors)
    first, second = jax.random.split(key)
    codes, scales = (parameter.arrays[field] for field in stored.fields[:2])
    drawn = {stored.fields[0]: _codes(first, codes.shape, str(codes.dtype), stored.bits)}
    if stored.kind == "rows":
        return drawn | {"scales": _row_scales(second, scales.shape, 1 / _SPREAD[stored.bits])}
    # Words of padded rows may be anything where their scales are 0.
    groups = -(-inputs // stored.group)
    unit = 1 / (_SPREAD[stored.bits] * inputs**0.5 * _SCALES[0])
    return drawn | {
        "scales": _scales(second, scales.shape, str(scales.dtype), groups),
        "unit": jnp.where(jnp.arange(scales.shape[1]) < outputs, jnp.float32(unit), 0),
    }


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "bits"))
def _codes(key: jax.Array, shape: tuple[int, int], dtype: str, bits: int) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    # Drawn four bytes at a time: a generator of bytes would take four times their memory on the way.
    drawn = jax.random.bits(key, (shape[0], shape[1] * width // 4), jnp.uint32)
    drawn = jax.lax.bitcast_convert_type(drawn, jnp.uint8)
    if bits == 8:
        drawn = jnp.where(drawn == 0x80, 0x81, drawn)  # -128 is no code
    return jax.lax.bitcast_convert_type(drawn.reshape((*shape, width) if width > 1 else shape), jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "groups"))
def _scales(key: jax.Array, shape: tuple[int, int], dtype: str, groups: int) -> jax.Array:
    """Words of scales around `_SCALES[0]`, of so many groups; the rest of them 0. A byte is 128 + the scale."""
    middle, spread = _SCALES
    planes = jnp.dtype(dtype).itemsize
    drawn = jax.random.randint(key, (*shape, planes), middle - spread, middle + spread + 1, jnp.int32)
    group = jnp.arange(shape[0])[:, None, None] * planes + jnp.arange(planes)
    drawn = 128 + jnp.where(group < groups, drawn, 0)
    return jax.lax.bitcast_convert_type(drawn.astype(jnp.uint8), jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("shape", "size"))
def _row_scales(key: jax.Array, shape: tuple[int, int], size: float) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, 0.5 * size, 1.5 * size).astype(jnp.bfloat16)


def _kind(name: str) -> str:
    """How a tensor that is not quantised is distributed: by what it does, so that layers share a compiled program."""
    if name.endswith(("A_log", "dt_bias")):
        return "gate"
    if "norm" in name.removesuffix(".weight").rpartition(".")[2]:
        return "gain" if "linear_attn" in name else "norm"  # all but the one inside a delta layer are zero-centred
    return "matrix"


@functools.partial(jax.jit, static_argnames=("kind", "shape", "dtype"))
def _plain(key: jax.Array, kind: str, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if kind == "gate":
        return jax.random.uniform(key, shape, jnp.float32, -1, 1).astype(dtype)
    if kind in ("gain", "norm"):
        return (0.1 * jax.random.normal(key, shape) + (kind == "gain")).astype(dtype)
    return (jax.random.normal(key, shape) / np.sqrt(shape[-1])).astype(dtype)


def fill_pages(state: State, seed: int) -> State:
    """`state` (donate it: its pools are rewritten one array at a time) with random finite numbers in every page."""
    key = _key(seed)
    pools, tree = jax.tree.flatten((state.kv, state.mtp_kv))
    filled = [_page_numbers(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(pools)]
    kv, mtp_kv = tree.unflatten(filled)
    return state._replace(kv=kv, mtp_kv=mtp_kv)


@functools.partial(jax.jit, donate_argnums=0)
def _page_numbers(leaf: jax.Array, key: jax.Array) -> jax.Array:
    """Stored numbers whose values are about 1, by the dtypes of the KV formats."""
    shape, dtype = leaf.shape, leaf.dtype
    if dtype == jnp.uint8:  # scale bytes of a 4-bit code: either sign, 0.125 to 0.23
        byte = jax.random.bits(key, shape, jnp.uint8)
        return ((byte & 8) << 4) | 56 | (byte & 7)
    if dtype == jnp.uint32:
        return jax.random.bits(key, shape, dtype)
    if dtype == jnp.int8:
        byte = jax.random.bits(key, shape, jnp.uint8)
        return jax.lax.bitcast_convert_type(jnp.where(byte == 0x80, 0x81, byte), jnp.int8)
    if dtype == jnp.float16:
        return jax.random.uniform(key, shape, jnp.float32, 0.005, 0.02).astype(dtype)
    values = jax.random.normal(key, shape)
    return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), dtype) if dtype == jnp.uint16 else values


def place(state: State, lengths: tuple[int, ...], token: int, seed: int) -> State:
    """Every admitted slot as if it had consumed so many tokens and emitted `token` last: random recurrent and convolution
    states (rewritten in place), which only the seed decides, and no row that waits; the pages stay as they are. Slots of
    length 0 take no part."""
    key, slots = _key(seed), state.slots
    # An array at a time: few shapes to compile for, whatever the number of layers.
    recurrent, conv = (
        tuple(_state_numbers(x, jax.random.fold_in(key, offset + 2 * i)) for i, x in enumerate(part))
        for offset, part in enumerate((state.recurrent, state.conv))
    )
    length = np.asarray(lengths, np.int32)
    slots = slots._replace(
        length=jnp.asarray(length),
        active=jnp.asarray(length > 0),
        token=jnp.full(slots.token.shape, token, jnp.int32),
        drafts=jnp.zeros(slots.drafts.shape, jnp.int32),
    )
    nothing = jnp.zeros_like(state.pending.count)
    pending = state.pending._replace(count=nothing, start=jnp.zeros_like(nothing))
    return state._replace(recurrent=recurrent, conv=conv, slots=slots, pending=pending)


@functools.partial(jax.jit, donate_argnums=0)
def _state_numbers(leaf: jax.Array, key: jax.Array) -> jax.Array:
    return (0.1 * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)


def tables(lengths: tuple[int, ...], room: int, pages: int, per_slot: int, page: int, seed: int) -> np.ndarray:
    """Block tables int32 `[slots, per_slot]`: to every slot of a length its pages, and `room` tokens more, in random order.

    ValueError where `pages` (page 0 is nobody's) are too few, or a slot holds less.
    """
    order = 1 + np.random.default_rng(seed).permutation(pages - 1)
    found, at = np.zeros((len(lengths), per_slot), np.int32), 0
    for slot, length in enumerate(lengths):
        count = -(-(length + room) // page) if length else 0
        if count > per_slot or at + count > len(order):
            there = min(per_slot, len(order) - at)
            raise ValueError(f"{length + room} tokens in slot {slot} need {count} pages, {there} are there")
        found[slot, :count] = order[at : at + count]
        at += count
    return found
