"""Where a CPU engine's weights lie."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.engine import huge_pages
from ninfer_jax.engine.huge_pages import PAGE, on_cpu


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [(700, 400), (1100,)])
def test_numbers_stay_and_memory_is_advised(rows, dtype):
    random = np.random.default_rng(0)
    parts = [random.standard_normal((n, 1100)).astype(dtype) for n in rows]
    array = on_cpu(parts)
    assert array.dtype == dtype
    np.testing.assert_array_equal(np.asarray(array), np.concatenate(parts))
    assert array.unsafe_buffer_pointer() % PAGE == 0, "copied to memory of JAX's own"
    assert "hg" in flags(array)


def test_small_arrays_and_scalars_are_left_alone():
    np.testing.assert_array_equal(
        np.asarray(on_cpu([np.ones((3, 4), np.float32), np.zeros((1, 4), np.float32)])), [[1] * 4] * 3 + [[0] * 4]
    )
    assert on_cpu([np.float32(2.5)]).shape == ()


@pytest.mark.engine
def test_an_engine_has_its_weights_there(micro_path, monkeypatch):
    # Matrices of the small checkpoint count as large here: its embedding, for one, has 272 KiB.
    monkeypatch.setattr(huge_pages, "PAGE", 1 << 14)
    engine = Engine.load(micro_path, EngineConfig(context=256, prefill_chunk=64, kv="f32", draft=0))
    matrices = [x for x in jax.tree.leaves(engine.runner.pool.parameters) if x.nbytes >= 1 << 14]
    assert len(matrices) > 4
    assert all("hg" in flags(x) for x in matrices)


def flags(array: jax.Array) -> list[str]:
    """The kernel's flags of the mapping that an array lies in: `hg` where large pages were asked for."""
    address = array.unsafe_buffer_pointer()
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if found:
                inside = int(found[1], 16) <= address < int(found[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")
