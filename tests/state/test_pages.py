"""The page allocator against a set-based model, and the sizes of the state for the 27B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.config import EngineConfig, preset
from ninfer_jax.state import PageAllocator, StateShape, allocate_state, state_shape, state_struct
from pallas_kernels.kv_codecs import FORMATS

PAGE = 64


def nbytes(tree: object) -> int:
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("seed", range(4))
def test_random_reservations_and_releases(seed: int) -> None:
    """No page is ever owned twice, page 0 never at all, and what is released can be reserved again."""
    rng = np.random.default_rng(seed)
    pages, per_slot = int(rng.integers(2, 40)), int(rng.integers(1, 12))
    allocator = PageAllocator(pages, per_slot)
    free, held = set(range(1, pages)), []
    refused = 0
    for _ in range(400):
        assert allocator.total == pages - 1 and allocator.free_tokens == len(free) * PAGE
        if held and rng.random() < 0.45:
            row = held.pop(rng.integers(len(held)))
            allocator.release(row)
            free |= {int(p) for p in row if p}
            continue
        tokens = int(rng.integers(1, (per_slot + 2) * PAGE))
        need = (tokens + PAGE - 1) // PAGE
        assert allocator.fits(tokens) == (need <= len(free))
        if need > min(len(free), per_slot):
            refused += 1
            with pytest.raises(ValueError) as error:
                allocator.reserve(tokens)
            assert str(tokens) in str(error.value) and "\n" not in str(error.value)
            continue
        row = allocator.reserve(tokens)
        assert row.dtype == np.int32 and row.shape == (per_slot,)
        owned = set(row[:need].tolist())
        assert len(owned) == need and owned <= free and not row[need:].any()
        free -= owned
        held.append(row)
    assert refused


def test_reserving_at_the_borders() -> None:
    allocator = PageAllocator(5, 3)
    for tokens, need in ((1, 1), (64, 1), (65, 2), (128, 2), (192, 3)):
        row = allocator.reserve(tokens)
        assert np.count_nonzero(row) == need
        allocator.release(row)
    with pytest.raises(ValueError, match="193 tokens need 4 pages, 4 are free and a slot may hold 3"):
        allocator.reserve(193)
    allocator.reserve(192)
    assert allocator.fits(64) and not allocator.fits(65)
    with pytest.raises(ValueError, match="65 tokens need 2 pages, 1 are free"):
        allocator.reserve(65)


BYTES_PER_HEAD = {  # one key and one value of 256 numbers, scales included
    "f32": 2 * 256 * 4,
    "bf16": 2 * 256 * 2,
    "int8": 2 * (256 + 4 * 2),
    "rk8v4": (256 + 4 * 2) + (128 + 8),
    "rk4v4": 2 * (128 + 8),
    "rk4v4-e8": 2 * (128 + 8),
}
BYTES_PER_TOKEN = {"f32": 131_072, "bf16": 65_536, "int8": 33_792, "rk8v4": 25_600, "rk4v4": 17_408, "rk4v4-e8": 17_408}


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_of_the_27b(format: str) -> None:
    model = preset("qwen3_6_27b")
    shape = state_shape(model, EngineConfig(slots=2, draft=3, pool=300 * PAGE), format, jnp.bfloat16)
    state = state_struct(model, shape)
    tokens = 301 * PAGE  # page 0 included
    assert len(state.kv) == 16
    assert {nbytes(pool) for pool in (*state.kv, state.mtp_kv)} == {4 * BYTES_PER_HEAD[format] * tokens}
    assert nbytes(state.kv) == BYTES_PER_TOKEN[format] * tokens
    for leaf in jax.tree.leaves(state.kv):
        assert leaf.shape[:3] == (301, 4, PAGE)
    assert len(state.recurrent) == len(state.conv) == 48
    # 48 heads of 128 x 128 float32.
    assert nbytes(state.recurrent) == 48 * 2 * 48 * 128 * 128 * 4
    # Rings of two rounds of four rows, of 2 x 16 x 128 + 48 x 128 channels in bfloat16.
    assert {(x.shape, x.dtype.itemsize) for x in state.conv} == {((2, 8, 10_240), 2)}
    assert nbytes(state.pending.records) == 48 * 2 * 8 * (16 * 128 + 48 * 128 + 2 * 48) * 4
    assert state.slots.table.shape == (2, 4096) and state.slots.drafts.shape == (2, 3) and state.slots.hidden.shape == (2, 5120)
    assert state.sampling.bias.shape == (2, 248_320)


def test_full_context_at_272_bytes_a_head() -> None:
    """4.25 bits a number: all 262,144 tokens of one slot take 4.25 GiB."""
    model = preset("qwen3_8_27b")
    shape = state_shape(model, EngineConfig(draft=0), "rk4v4-e8", jnp.bfloat16)
    assert (shape.context, shape.pages, shape.pages_per_slot) == (262_144, 4097, 4096)
    state = state_struct(model, shape)
    assert state.mtp_kv is None
    assert nbytes(state.kv) == (262_144 + PAGE) * 17_408


def test_capacities() -> None:
    model = preset("qwen3_6_27b")

    def resolve(**engine: int) -> StateShape:
        return state_shape(model, EngineConfig(**engine), "f32", jnp.float32)

    assert resolve(context=100, slots=3).pages == 3 * 2 + 1
    assert resolve(context=100).pages_per_slot == 2
    assert resolve(context=128, slots=4, pool=65).pages == 2 + 1
    small = model.__class__(**{**model.__dict__, "max_positions": 4096})
    assert state_shape(small, EngineConfig(), "f32", jnp.float32).context == 4096
    with pytest.raises(ValueError, match="context is 5000, the model's max_position_embeddings is 4096"):
        state_shape(small, EngineConfig(context=5000), "f32", jnp.float32)


def test_a_new_state_is_zero() -> None:
    model = preset("qwen3_6_27b")
    small = model.__class__(**{**model.__dict__, "vocab_size": 64, "hidden_size": 64, "layer_types": model.layer_types[2:4]})
    shape = state_shape(small, EngineConfig(context=64, draft=1), "rk4v4", jnp.float32)
    state, struct = allocate_state(small, shape), state_struct(small, shape)
    for array, expected in zip(jax.tree.leaves(state), jax.tree.leaves(struct), strict=True):
        assert array.shape == expected.shape and array.dtype == expected.dtype and not np.asarray(array).any()
