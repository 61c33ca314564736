"""A slot's state and its pages leave the device and come back, elsewhere: what goes on from there is what would have gone on."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from ninfer_jax import Engine, SamplingParams
from ninfer_jax.engine.slot_pool import Lease, SlotPool
from ninfer_jax.programs import Snapshot

IDS = np.random.default_rng(3).integers(0, 1024, 150).tolist()
CUT, LENGTH, ROUNDS = 64, 150, 12
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def pool(micro_drafting: Engine) -> Iterator[SlotPool]:
    pool = micro_drafting.runner.pool
    assert pool.busy == 0 and pool.free_tokens == pool.total_tokens
    yield pool
    assert pool.busy == 0 and pool.free_tokens == pool.total_tokens


def append(lease: Lease, tokens: list[int]) -> None:
    for _ in lease.prefill(tokens):
        pass


def on_host(snapshot: Snapshot) -> Snapshot:
    return jax.tree.map(np.array, snapshot)


def pages_of(pool: SlotPool, lease: Lease, count: int) -> list[np.ndarray]:
    return [np.array(pool.read_page(page)) for page in lease.table[:count]]


def contents(pool: SlotPool, lease: Lease, tokens: int) -> list[np.ndarray]:
    """All that is known of a slot after so many tokens, read from the state's arrays: no program of these tests."""
    with pool.transaction():
        pool.settle()
    state, slot = pool.state, lease.slot
    at = np.arange(tokens)
    rows = [np.asarray(leaf)[lease.table[at // 64], :, at % 64] for leaf in jax.tree.leaves(state.kv)]
    rows += [np.asarray(leaf)[lease.table[at[:-1] // 64], :, at[:-1] % 64] for leaf in jax.tree.leaves(state.mtp_kv)]
    width = pool.programs.config.conv_width
    rows += [np.asarray(x[slot]) for x in state.recurrent] + [np.asarray(x[slot, : width - 1]) for x in state.conv]
    return [*rows, np.asarray(state.slots.hidden[slot]), np.asarray(state.sampling.in_prompt[slot])]


def answer(pool: SlotPool, lease: Lease) -> list[int]:
    tokens = [int(np.asarray(lease.begin().tokens)[lease.slot, 0])]
    for _ in range(ROUNDS):
        with pool.transaction():
            out = pool.round()
        tokens += np.asarray(out.tokens)[lease.slot, : int(out.emitted[lease.slot])].tolist()
    return tokens


def admitted(pool: SlotPool, shared: list[int] | None = None) -> Lease:
    with pool.transaction():
        lease = pool.admit(LENGTH + 2 * ROUNDS + 2, 2 * ROUNDS + 2, GREEDY, shared=shared or [])
    assert lease is not None
    return lease


def cold(pool: SlotPool) -> tuple[list[np.ndarray], list[int]]:
    """What a sequence leaves behind that went its way alone, and its answer."""
    with admitted(pool) as lease:
        append(lease, IDS)
        return contents(pool, lease, LENGTH), answer(pool, lease)


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert [x.tobytes() for x in ours] == [x.tobytes() for x in theirs]


def test_a_restored_slot_goes_on_as_the_one_that_was_taken(pool: SlotPool) -> None:
    """In another slot, on other pages, after a way over the host; the slot that was left goes on beside it."""
    wanted, said = cold(pool)
    with admitted(pool) as lease:
        append(lease, IDS[:CUT])
        taken, pages = on_host(lease.snapshot()), pages_of(pool, lease, 1)
        assert taken.length == CUT and taken.linked
        with admitted(pool) as other:
            assert other.slot != lease.slot and not set(other.table) & set(lease.table) - {0}
            with pool.transaction():
                pool.write_page(int(other.table[0]), pages[0])
            other.restore(taken, IDS[:CUT])
            assert other.length == CUT
            append(other, IDS[CUT:])
            append(lease, IDS[CUT:])
            assert_same(contents(pool, other, LENGTH), wanted)
            assert_same(contents(pool, lease, LENGTH), wanted)
            assert answer(pool, other) == said


def test_slots_share_pages_and_copy_the_last_one(pool: SlotPool) -> None:
    """Each page is free again when its last owner ends, whichever that is."""
    wanted, said = cold(pool)
    first = admitted(pool)
    append(first, IDS[:128])
    taken, free = on_host(first.snapshot()), pool.free_tokens
    second = admitted(pool, shared=[int(first.table[0])])
    assert second.table[0] == first.table[0] and second.table[1] != first.table[1]
    assert pool.free_tokens == free - 64 * (np.count_nonzero(second.table) - 1)
    with pool.transaction():
        pool.copy_page(int(first.table[1]), int(second.table[1]))
    second.restore(taken, IDS[:128])
    append(first, [5, 6, 7])  # into its own third page
    append(second, IDS[128:])
    assert_same(contents(pool, second, LENGTH), wanted)
    first.end()
    assert pool.free_tokens == pool.total_tokens - 64 * np.count_nonzero(second.table)
    assert answer(pool, second) == said
    second.end()


def test_the_entry_that_waits_for_its_next_token_is_made_anew(pool: SlotPool) -> None:
    """The MTP layer's entry of the last token before the cut depends on the token after it, which is another one here."""
    changed = [*IDS[:CUT], *reversed(IDS[CUT:])]
    with admitted(pool) as lease:
        append(lease, changed)
        wanted = contents(pool, lease, LENGTH)
    with admitted(pool) as lease:
        append(lease, IDS)  # leaves the entry that goes with the old token in the page
        (page,) = pages_of(pool, lease, 1)
    with admitted(pool) as lease:
        append(lease, IDS[:CUT])
        taken = on_host(lease.snapshot())
    with admitted(pool) as lease:
        with pool.transaction():
            pool.write_page(int(lease.table[0]), page)
        lease.restore(taken, IDS[:CUT])
        append(lease, changed[CUT:])
        assert_same(contents(pool, lease, LENGTH), wanted)


def test_a_snapshot_in_the_middle_of_answers(pool: SlotPool) -> None:
    """What waits enters first; neither slot's answer changes, and one restored from it, with as many tokens, stands where the
    first one stood."""
    _, said = cold(pool)
    with admitted(pool) as one, admitted(pool) as two:
        tokens = {}
        for lease in (one, two):
            append(lease, IDS)
            tokens[lease] = [int(np.asarray(lease.begin().tokens)[lease.slot, 0])]
        for at in range(ROUNDS):
            with pool.transaction():
                out = pool.round()
            for lease in (one, two):
                tokens[lease] += np.asarray(out.tokens)[lease.slot, : int(out.emitted[lease.slot])].tolist()
            if at == 4:
                taken = on_host(one.snapshot())
                assert taken.length == LENGTH + len(tokens[one]) - 1 and not taken.linked
                pages = pages_of(pool, one, -(-int(taken.length) // 64))
                consumed = [*IDS, *tokens[one][:-1]]
        assert tokens[one] == tokens[two] == said
    with admitted(pool) as lease:
        with pool.transaction():
            for page, data in zip(lease.table, pages, strict=False):
                pool.write_page(int(page), data)
        lease.restore(taken, consumed)
        append(lease, [said[len(consumed) - LENGTH]])
        first = int(np.asarray(lease.begin().tokens)[lease.slot, 0])
        assert first == said[len(consumed) - LENGTH + 1]


def test_a_page_is_the_bytes_of_all_pools(pool: SlotPool) -> None:
    """In the order of the layers, the MTP layer last, as a file may keep it."""
    with admitted(pool) as lease:
        append(lease, IDS)
        for page in lease.table[:3]:
            leaves = jax.tree.leaves((pool.state.kv, pool.state.mtp_kv))
            wanted = b"".join(np.asarray(leaf)[page].tobytes() for leaf in leaves)
            (got,) = (np.asarray(pool.read_page(int(page))),)
            assert got.dtype == np.uint8 and got.tobytes() == wanted and len(wanted) == pool.page_bytes


def test_what_does_not_fit_is_refused(pool: SlotPool) -> None:
    with admitted(pool) as lease:
        append(lease, IDS[:64])
        taken = on_host(lease.snapshot())
        with pool.lease(10) as small, pytest.raises(ValueError, match="64 tokens after 0 are more than the 10"):
            small.restore(taken, IDS[:64])
        with pytest.raises(ValueError, match="page 0 is shared, but nobody owns it"):
            pool.pages.share(np.array([0]))
