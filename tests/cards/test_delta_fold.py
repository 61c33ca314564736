"""Replay of accepted rows: numbers against float64 NumPy, the very bits of decoding row by row, and compiled facts."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import ptx_machine
import pytest

from pallas_kernels import inspect, targets
from pallas_kernels.delta_decode import cases as decode_cases
from pallas_kernels.delta_decode import kernel as decode_kernel
from pallas_kernels.delta_fold import cases, kernel
from pallas_kernels.delta_rule import Transitions
from pallas_kernels.lab import rows

THREE_SLOTS = cases.SMALL[1]


def oracle(arguments):
    state, conv, records, projected, accepted = arguments
    k, v, decay, beta = (np.asarray(x, np.float64) for x in records)
    state, conv = np.array(state, np.float64), np.array(conv, np.float64)
    slots, rows, value_heads, _ = v.shape
    raw = np.asarray(projected, np.float64).reshape(slots, rows, -1)[..., : conv.shape[2]]
    window = np.concatenate([conv, raw], axis=1)
    for slot, count in enumerate(np.asarray(accepted)):
        for row in range(count):
            for head in range(value_heads):
                s, key = state[slot, head], k[slot, row, head * k.shape[2] // value_heads]
                s *= decay[slot, row, head]
                s += np.outer(key, beta[slot, row, head] * (v[slot, row, head] - key @ s))
        conv[slot] = window[slot, count : count + conv.shape[1]]
    return state, conv


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def bits(tree):
    return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def assert_same_bits(got, want):
    for x, y in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("accepted", range(5))
def test_any_number_of_accepted_rows_against_float64(accepted):
    case = cases.SMALL[0]
    arguments = case.sample(jax.random.key(accepted))
    arguments[4] = jnp.array([accepted], jnp.int32)
    state, conv = case.call(*arguments, interpret=True)
    want_state, want_conv = oracle(arguments)
    assert relative(state, want_state) <= 1e-5
    np.testing.assert_array_equal(np.asarray(conv, np.float64), want_conv)


def test_slots_on_their_own_and_what_is_not_accepted_is_not_read():
    """Accepted 2, 1 and 0 rows of 2. NaN in rejected rows, in the gates among the projections and in all that belongs
    to the slot without rows changes no bit of the others; that slot keeps its own bits."""
    case = THREE_SLOTS
    state, conv, records, projected, accepted = case.sample(jax.random.key(3))
    assert accepted.tolist() == [2, 1, 0]
    want = oracle((state, conv, records, projected, accepted))
    state, conv = state.at[2].set(jnp.nan), conv.at[2].set(jnp.nan)
    records = Transitions(*(x.at[1, 1].set(jnp.nan).at[2].set(jnp.nan) for x in records))
    projected = projected.at[:, case.channels :].set(jnp.nan).at[3:].set(jnp.nan)
    got = case.call(state, conv, records, projected, accepted, interpret=True)
    assert relative(got[0][:2], want[0][:2]) <= 1e-5
    np.testing.assert_array_equal(np.asarray(got[1][:2], np.float64), want[1][:2])
    assert_same_bits(jax.tree.map(lambda x: x[2], got), (state[2], conv[2]))


def test_counts_outside_the_rows_are_taken_as_the_nearest():
    state, conv, records, projected, _ = THREE_SLOTS.sample(jax.random.key(4))
    got, want = (
        THREE_SLOTS.call(state, conv, records, projected, jnp.array(accepted, jnp.int32), interpret=True)
        for accepted in ([7, -3, 2], [2, 0, 2])
    )
    assert_same_bits(got, want)


def test_rows_one_by_one_leave_the_bits_of_rows_together():
    """Four rows verified at once, against decode and fold of one row four times: outputs, records, states, windows.
    Then each slot accepts another number of the four, and has the state that plain decoding had there."""
    case = decode_cases.SMALL[3]
    arguments = case.sample(jax.random.key(5))
    projected, ab, conv, state, *weights = arguments
    out, records = case.call(*arguments, interpret=True)
    states = [(state, conv)]
    for row in range(4):
        token = [x.reshape(3, 4, -1)[:, row] for x in (projected, ab)]
        alone = decode_kernel.delta_decode(*token, conv, state, *weights, rows=1, eps=decode_cases.EPS, interpret=True)
        together = out.reshape(3, 4, -1)[:, row], jax.tree.map(lambda x: x[:, row : row + 1], records)
        assert_same_bits(alone, together)
        state, conv = kernel.delta_fold(state, conv, alone[1], token[0], jnp.ones(3, jnp.int32), interpret=True)
        states.append((state, conv))
    for accepted in ([4, 3, 2], [1, 0, 4]):
        got = kernel.delta_fold(*states[0], records, projected, jnp.array(accepted, jnp.int32), interpret=True)
        for slot, count in enumerate(accepted):
            assert_same_bits(jax.tree.map(lambda x: x[slot], got), jax.tree.map(lambda x: x[slot], states[count]))


def test_bad_input_is_named():
    shapes = THREE_SLOTS.arguments()
    shapes[0] = jax.ShapeDtypeStruct((3, 6, 96, 64), jnp.float32)
    with pytest.raises(ValueError, match="delta_fold: recurrent has key_dim 96, a power of two from 32 to 256 is needed"):
        jax.eval_shape(THREE_SLOTS.call, *shapes)


# What decides the bits of a step: arithmetic, exchanges between the lanes of a warp with their distance, and the way
# through shared memory.
DECIDING = re.compile(r"(?:@\S+\s+)?((?:fma|mul|add|sub)\.\S*f32|shfl\S+|bar\.sync|[ls][dt]\.shared\S*)\s+(.*);")


def steps(case):
    """Instructions of a case's PTX that decide a result, and where each read-out's chains of 15 multiply-adds start."""
    found = []
    for op, operands in DECIDING.findall(ptx_machine.ptx_of(case)):
        distance = operands.split(",")[2] if op.startswith("shfl") else ""
        found.append(op + distance)
    chain = ["mul.rn.f32"] * 4 + ["fma.rn.f32"] * 60
    return found, [i for i in range(len(found)) if found[i : i + 64] == chain]


def test_compiled_steps_are_the_same_instructions_in_both_kernels():
    """From S^T k to the advanced state: the replay's loop body is in the decode kernel once a row, in the same order."""
    folded, (start,) = steps(cases.CASES[0])
    step = folded[start:]
    # Of S^T k 4 chains and 3 x 4 additions across warps; u; per element of S one product and one multiply-add.
    arithmetic = collections.Counter(op for op in step if op.endswith(".f32"))
    assert arithmetic == {"mul.rn.f32": 4 + 8 + 64, "fma.rn.f32": 60 + 64, "add.rn.f32": 12, "sub.rn.f32": 4}
    decoded, starts = steps(decode_cases.CASES[1])
    # A row reads S twice, for k and, advanced, for q.
    assert len(starts) == 8
    for row in range(4):
        assert decoded[starts[2 * row] :][: len(step)] == step
    # Nothing in a step is left to the assembler: a product without its rounding spelled out might be fused or not.
    assert all(re.search(r"\.r[nmz]\.", op) for op in decoded + folded if op.startswith(("fma", "mul", "add", "sub")))


def test_compiled_kernels_run_row_by_row_and_together():
    """The code for the 4090, executed here: `test_rows_one_by_one..` for it, at the real head size."""
    heads = dict(slots=2, key_heads=1, value_heads=3)
    case = decode_cases.Case("", rows=4, **heads)
    one, fold, fold_one = decode_cases.Case("", rows=1, **heads), cases.Case("", rows=4, **heads), cases.Case("", rows=1, **heads)
    arguments = [np.asarray(a) for a in case.sample(jax.random.key(6))]
    projected, ab, conv, state, *weights = arguments
    out, records = ptx_machine.call(case, arguments, grid=(3, 2))
    states = [(state, conv)]
    for row in range(4):
        token = [x.reshape(2, 4, -1)[:, row] for x in (projected, ab)]
        alone = ptx_machine.call(one, [*token, conv, state, *weights], grid=(3, 2))
        assert_same_bits(alone, (out.reshape(2, 4, -1)[:, row], jax.tree.map(lambda x: x[:, row : row + 1], records)))
        state, conv = ptx_machine.call(fold_one, [state, conv, alone[1], token[0], np.ones(2, np.int32)], grid=(3, 2))
        states.append((state, conv))
    for accepted in ([4, 3], [2, 0], [0, 1]):
        folding = [*states[0], records, projected, np.array(accepted, np.int32)]
        got = ptx_machine.call(fold, folding, grid=(3, 2))
        want = oracle(folding)
        assert relative(got[0], want[0]) <= 1e-5
        np.testing.assert_array_equal(got[1].astype(np.float64), want[1])
        for slot, count in enumerate(accepted):
            assert_same_bits(jax.tree.map(lambda x: x[slot], got), jax.tree.map(lambda x: x[slot], states[count]))


@functools.cache
def compiled(case, target="rtx4090"):
    return rows.measure(case, target)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_compiled_for_a_4090(case):
    row = compiled(case)
    assert row.launches == 1
    assert row.spill_bytes == 0
    assert row.smem_bytes <= 99 * 1024
    assert row.bytes_moved <= 1.05 * row.ideal_bytes
    assert row.thread_instructions_per_byte <= 8
    assert row.limit == "memory"
    assert row.blocks_per_sm >= 2


def test_states_change_in_place():
    case = cases.CASES[1]
    report = inspect.report(case.call, case.arguments(), donate=case.donate)
    assert report.copies == 0 and report.temporary_bytes == 0
    assert report.aliased_bytes == case.state_bytes + case.conv_bytes


@pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
def test_compiles_for_other_cards(target):
    row = compiled(cases.CASES[0], target)
    assert row.spill_bytes == 0 and row.launches == 1
    assert row.smem_bytes <= targets.get(target).smem_per_block
