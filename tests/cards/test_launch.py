"""The launch layer: masked access in interpret mode, and the checks that come before a GPU compiler would complain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import launch


def _copy_tail(x, size, block):
    """Copies the first `size` entries of x, block by block; the last block overhangs."""

    def kernel(x_ref, o_ref):
        at = pl.program_id(0) * block
        inside = at + jnp.arange(block) < size
        launch.store(o_ref, pl.ds(at, block), launch.load(x_ref, pl.ds(at, block), inside, 0) + 1, inside)

    return launch.launch(
        kernel,
        name="copy_tail",
        grid=(-(-size // block),),
        in_specs=[launch.whole(x)],
        out_specs=launch.whole(x),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_warps=1,
        num_stages=1,
        aliases={0: 0},
        interpret=True,
    )(x)


@pytest.mark.parametrize("size", [1, 8, 13, 19])
def test_masked_access_leaves_the_rest_of_the_array_alone(size):
    x = np.arange(19, dtype=np.float32)
    x[size:] = np.nan
    want = x.copy()
    want[:size] += 1
    np.testing.assert_array_equal(_copy_tail(jnp.asarray(x), size, 8), want)


def test_a_block_value_of_any_other_size_is_refused():
    with pytest.raises(ValueError, match=r"\(6,\).*power of two"):
        _copy_tail(jnp.zeros(19), 19, 6)


def test_dot_wants_equal_types():
    with pytest.raises(ValueError, match="bfloat16 and float32"):
        launch.dot(jnp.zeros((16, 16), jnp.bfloat16), jnp.zeros((16, 16)))


def test_auto_takes_xla_on_a_cpu_and_unknown_names_are_refused():
    branches = dict(pallas=lambda x: x + 1, xla=lambda x: x - 1)
    assert launch.by_platform(jnp.ones(()), **branches) == 0
    assert launch.by_platform(jnp.ones(()), **branches, impl="pallas") == 2
    with pytest.raises(ValueError, match="impl: 'mosaic' is not one of auto, pallas, xla"):
        launch.by_platform(jnp.ones(()), **branches, impl="mosaic")


def test_triton_insists_and_is_refused_where_there_is_no_such_form():
    branches = dict(pallas=lambda x: x + 1, xla=lambda x: x - 1)
    assert launch.by_platform(jnp.ones(()), **branches, triton=lambda x: 3 * x, impl="triton") == 3
    with pytest.raises(ValueError, match="impl: 'triton' is not one of auto, pallas, xla"):
        launch.by_platform(jnp.ones(()), **branches, impl="triton")
