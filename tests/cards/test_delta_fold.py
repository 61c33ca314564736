"""Settling what waits: numbers against float64 NumPy, the very bits of decoding row by row, and compiled facts."""

import collections
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import ptx_machine
import pytest

from pallas_kernels import inspect, targets
from pallas_kernels.delta_decode import cases as decode_cases
from pallas_kernels.delta_decode import kernel as decode_kernel
from pallas_kernels.delta_fold import cases, delta_fold, kernel
from pallas_kernels.lab import rows

THREE_SLOTS = cases.SMALL[1]
EPS = decode_cases.EPS


def oracle(case, arguments):
    state, conv, records, starts, counts = arguments
    k, v, decay, beta = unpacked(case, np.asarray(records, np.float64))
    state, conv = np.array(state, np.float64), np.array(conv, np.float64)
    for slot, (start, count) in enumerate(zip(np.asarray(starts), np.asarray(counts), strict=True)):
        if count < 0:
            continue
        for row in (start + np.arange(count)) % case.ring:
            for head in range(case.value_heads):
                s, key = state[slot, head], k[slot, row, head * case.key_heads // case.value_heads]
                s *= decay[slot, row, head]
                s += np.outer(key, beta[slot, row, head] * (v[slot, row, head] - key @ s))
        kept = case.width - 1
        conv[slot, :kept] = conv[slot, (start + count + np.arange(kept)) % case.ring]
    return state, conv


def unpacked(case, records):
    keys, heads = case.key_heads * case.key_dim, case.value_heads
    k, v, decay, beta = np.split(records, [keys, keys + case.inner, keys + case.inner + heads], axis=-1)
    lead = records.shape[:2]
    return k.reshape(*lead, case.key_heads, case.key_dim), v.reshape(*lead, heads, case.value_dim), decay, beta


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def bits(tree):
    return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def assert_same_bits(got, want):
    for x, y in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(case, got, arguments):
    state, conv = oracle(case, arguments)
    assert relative(got[0], state) <= 1e-5
    np.testing.assert_array_equal(np.asarray(got[1], np.float64), conv)


@pytest.mark.parametrize("count", range(-1, 5))
def test_any_number_of_waiting_rows_against_float64(count):
    case = cases.SMALL[0]
    arguments = case.sample(jax.random.key(count + 1))
    arguments[4] = jnp.array([count], jnp.int32)
    for start in (0, 6):
        arguments[3] = jnp.array([start], jnp.int32)
        assert_close(case, case.call(*arguments, interpret=True), arguments)


def test_xla_form_against_float64():
    arguments = THREE_SLOTS.sample(jax.random.key(7))
    arguments[4] = jnp.array([2, -1, 0], jnp.int32)
    assert_close(THREE_SLOTS, delta_fold(*arguments, jnp.int32(0), width=THREE_SLOTS.width, impl="xla"), arguments)


@pytest.mark.bits
def test_slots_on_their_own_and_rows_that_do_not_wait_are_not_read():
    """2, 1 and 0 rows wait. NaN in all other records, in the raw inputs outside the window and in the state of the slot
    without rows changes no bit of the others; that slot's state keeps its own bits. A negative count keeps the window too."""
    case = THREE_SLOTS
    state, conv, records, start, count = case.sample(jax.random.key(3))
    assert count.tolist() == [2, 1, 0] and start.tolist() == [4, 0, 1] and case.ring == 5
    want = case.call(state, conv, records, start, count, interpret=True)
    assert_close(case, want, (state, conv, records, start, count))
    state = state.at[2].set(jnp.nan)
    waits = jnp.zeros((3, 5), bool).at[jnp.array([0, 0, 1]), jnp.array([4, 0, 0])].set(True)
    window = ((start + count)[:, None] + jnp.arange(3)) % 5
    windows = jnp.zeros((3, 5), bool).at[jnp.arange(3)[:, None], window].set(True)
    poisoned = jnp.where(windows[..., None], conv, jnp.nan)
    got = case.call(state, poisoned, jnp.where(waits[..., None], records, jnp.nan), start, count, interpret=True)
    assert_same_bits((got[0][:2], got[1][:, :3]), (want[0][:2], want[1][:, :3]))
    assert_same_bits(got[0][2], state[2])
    left = case.call(state, conv, records, start, jnp.full(3, -1, jnp.int32), interpret=True)
    assert_same_bits(left, (state, conv))


class Memory(NamedTuple):
    """What a delta layer keeps between rounds."""

    conv: jax.Array
    state: jax.Array
    records: jax.Array
    start: jax.Array
    count: jax.Array


def fresh(case, arguments):
    """Nothing waits, and all slots start at the front of their rings."""
    nothing = np.zeros(case.slots, np.int32)
    return Memory(*arguments[2:5], nothing, nothing)


def passed(run, memory, accepted, inputs, weights):
    """A pass over `inputs` (projected, ab), of whose rows `accepted` stay: its outputs, and what is kept."""
    out, conv, state, records = run(*inputs, *memory, *weights)
    start = (np.asarray(memory.start) + np.maximum(memory.count, 0)) % conv.shape[1]
    return out, Memory(conv, state, records, start.astype(np.int32), np.asarray(accepted, np.int32))


def check_rows_in_any_cut(case, decode, settle):
    """Four rows at once of which a slot accepts some, then its next four, against the same tokens one row at a time: the
    bits of outputs, and of states and windows once settled. decode(rows) and settle: the kernels, however they are run."""
    slots = case.slots
    arguments = [np.asarray(a) for a in case.sample(jax.random.key(5))]
    projected, ab, weights = arguments[0], arguments[1], arguments[7:]
    # Seven tokens a slot; a pass of four sees those that come next.
    tokens = [
        np.concatenate([x.reshape(slots, 4, -1), x.reshape(slots, 4, -1)[:, ::-1][:, :3] / 2], 1).astype(x.dtype)
        for x in (projected, ab)
    ]
    plain, memory, outputs = [], fresh(case, arguments), []
    for row in range(7):
        out, memory = passed(decode(1), memory, np.ones(slots), [x[:, row] for x in tokens], weights)
        outputs.append(np.asarray(out))
        plain.append(settle(*memory[1::-1], *memory[2:]))
    plain.insert(0, settle(*fresh(case, arguments)[1::-1], *fresh(case, arguments)[2:]))
    for accepted in ([4, 3, 2], [1, 0, 3]):
        accepted = accepted[:slots]
        memory = fresh(case, arguments)
        done = np.zeros(slots, int)
        for last in ([0] * slots, accepted):
            done = done + last
            take = np.stack([np.arange(d, d + 4) for d in np.minimum(done, 3)])
            inputs = [np.take_along_axis(x, take[..., None], 1).reshape(4 * slots, -1) for x in tokens]
            out, memory = passed(decode(4), memory, accepted, inputs, weights)
            for slot in range(slots):
                if done[slot] <= 3:
                    want = np.stack([outputs[done[slot] + row][slot] for row in range(4)])
                    assert_same_bits(np.asarray(out).reshape(slots, 4, -1)[slot], want)
            got = settle(*memory[1::-1], *memory[2:])
            for slot in range(slots):
                if done[slot] + accepted[slot] <= 7 and done[slot] <= 3:
                    want = plain[done[slot] + accepted[slot]]
                    assert_same_bits(got[0][slot], want[0][slot])
                    assert_same_bits(got[1][slot, : case.width - 1], want[1][slot, : case.width - 1])


@pytest.mark.bits
def test_rows_in_any_cut_leave_the_bits_of_rows_one_by_one():
    case = decode_cases.SMALL[3]

    def decode(rows):
        return functools.partial(decode_kernel.delta_decode, rows=rows, eps=EPS, interpret=True)

    check_rows_in_any_cut(case, decode, functools.partial(kernel.delta_fold, width=case.width, interpret=True))


@pytest.mark.bits
def test_deciding_to_settle_changes_no_bit():
    """A pass after settling, and the same pass to which the rows are left."""
    case = decode_cases.SMALL[3]
    projected, ab, *kept, taps, a_log, dt_bias, norm = case.sample(jax.random.key(8))
    memory = Memory(*kept)
    state, conv = kernel.delta_fold(memory.state, memory.conv, *memory[2:], width=case.width, interpret=True)
    nothing = jnp.zeros(3, jnp.int32)
    run = functools.partial(decode_kernel.delta_decode, rows=4, eps=EPS, interpret=True)
    weights = taps, a_log, dt_bias, norm
    left = run(projected, ab, *memory, *weights)
    settled = run(projected, ab, conv, state, memory.records, nothing, nothing, *weights)
    assert_same_bits((left[0], left[2]), (settled[0], settled[2]))


def test_bad_input_is_named():
    shapes = THREE_SLOTS.arguments()
    shapes[0] = jax.ShapeDtypeStruct((3, 6, 96, 64), jnp.float32)
    with pytest.raises(ValueError, match="delta_fold: recurrent has key_dim 96, a power of two from 32 to 256 is needed"):
        jax.eval_shape(THREE_SLOTS.call, *shapes)
    arguments = [*THREE_SLOTS.sample(jax.random.key(0)), jnp.int32(0)]
    for at, wrong, message in (
        (1, arguments[1][:, :3], r"delta_fold: conv has 3 rows, 1 rows a slot need 4"),
        (2, arguments[2][..., 1:], r"delta_fold: records \(3, 5, 523\) must be \(3, 5, 524\)"),
        (4, arguments[4][:2], r"delta_fold: count \(2,\) must be \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            delta_fold(*arguments[:at], wrong, *arguments[at + 1 :], width=4)


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


def test_compiled_steps_are_the_same_instructions_wherever_they_stand():
    """From S^T k to the advanced state: the loop body that settles is in the decode kernel as its loop over the rows that
    wait and once more for each new row, in the same order."""
    folded, (start,) = steps(cases.CASES[0])
    step = folded[start:]
    # Of S^T k 4 chains and 3 x 4 additions across warps; u; per element of S one product and one multiply-add.
    arithmetic = collections.Counter(op for op in step if op.endswith(".f32"))
    assert arithmetic == {"mul.rn.f32": 4 + 8 + 64, "fma.rn.f32": 60 + 64, "add.rn.f32": 12, "sub.rn.f32": 4}
    decoded, starts = steps(decode_cases.CASES[1])
    # The loop reads S once a row; a new row twice, for k and, advanced, for q.
    assert len(starts) == 1 + 2 * 4
    for at in (starts[0], *starts[1::2]):
        assert decoded[at:][: len(step)] == step
    # Nothing in a step is left to the assembler: a product without its rounding spelled out might be fused or not.
    assert all(re.search(r"\.r[nmz]\.", op) for op in decoded + folded if op.startswith(("fma", "mul", "add", "sub")))


def test_compiled_kernels_run_in_any_cut():
    """The code for the 4090, executed here: `test_rows_in_any_cut..` for it, at the real head size."""
    heads = dict(slots=2, key_heads=1, value_heads=3)
    case, fold = decode_cases.Case("", rows=4, **heads), cases.Case("", rows=4, **heads)
    # Of one row a slot, over the rings of four.
    one = decode_cases.Case("", rows=1, room=4, **heads)

    def decode(rows):
        return lambda *arguments: ptx_machine.call(case if rows == 4 else one, arguments, grid=(3, 2))

    check_rows_in_any_cut(case, decode, lambda *arguments: ptx_machine.call(fold, arguments, grid=(3, 2)))
    arguments = fold.sample(jax.random.key(6))
    assert_close(fold, ptx_machine.call(fold, arguments, grid=(3, 2)), arguments)


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
    assert row.thread_instructions_per_byte <= 4
    assert row.limit == "memory"


def test_states_change_in_place():
    case = cases.CASES[1]
    report = inspect.report(case.call, case.arguments(), donate=case.donate)
    assert report.copies == 0 and report.temporary_bytes == 0
    assert report.aliased_bytes == case.state_bytes + case.ring_bytes()[0]


@pytest.mark.full
@pytest.mark.parametrize("target", sorted(set(targets.names()) - {"rtx4090"}))
def test_compiles_for_other_cards(target):
    row = compiled(cases.CASES[0], target)
    assert row.spill_bytes == 0 and row.launches == 1
    assert row.smem_bytes <= targets.get(target).smem_per_block
