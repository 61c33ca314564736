"""What must not change a single bit of a prefilled sequence: cuts at multiples of 64, and what the padding rows hold."""

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.bits
CASES = ["ratio3-8layers", "ratio1-4layers-tied"]


def contents(sequence, hidden):
    """Everything a prefill may leave behind, page 0 (which nobody owns) excepted."""
    state = sequence.state
    pools = jax.tree.map(lambda leaf: leaf[1:], (state.kv, state.mtp_kv))
    rest = state._replace(kv=(), mtp_kv=None)
    return [hidden, *map(np.asarray, jax.tree.leaves((pools, rest)))]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("cut", [64, 128, 192])
@pytest.mark.parametrize("length", [128, 200])
@pytest.mark.parametrize("name", CASES)
def test_cuts_at_multiples_of_64(name, length, cut, harness, ids):
    whole, pieces = harness(name).sequence(), harness(name).sequence()
    assert_same_bits(contents(pieces, pieces.prefill(ids[:length], cut=cut)), contents(whole, whole.prefill(ids[:length])))


@pytest.mark.parametrize("length", [1, 63, 65, 200])
@pytest.mark.parametrize("name", CASES)
def test_padding_rows(name, length, harness, ids):
    zeros, others = harness(name).sequence(), harness(name).sequence()
    assert_same_bits(contents(others, others.prefill(ids[:length], padding=7)), contents(zeros, zeros.prefill(ids[:length])))
