"""The prefix cache at work on one engine's slots: what it brings back is what would have been prefilled, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.engine.prefix_settings import budget_of, mode_of, open_prefixes
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease, SlotPool

RNG = np.random.default_rng(8)
IDS = RNG.integers(0, 1024, 250).tolist()
GREEDY = SamplingParams(temperature=0.0)
Open = Callable[..., KeptPrefixes]


@pytest.fixture
def pool(micro_drafting: Engine) -> Iterator[SlotPool]:
    pool = micro_drafting.runner.pool
    assert pool.busy == 0 and pool.free_tokens == pool.total_tokens
    yield pool
    assert pool.busy == 0 and pool.free_tokens == pool.total_tokens


@pytest.fixture
def kept(pool: SlotPool) -> Open:
    """A cache on that pool. weights: by name."""

    def new(mode: str = "exact", cache_bytes: int = 1 << 24, cache_dir: Path | None = None, weights: str = "w") -> KeptPrefixes:
        config = EngineConfig(prefix_cache=mode, cache_bytes=cache_bytes, cache_dir=cache_dir)
        return open_prefixes(pool, config, mode_of(config, True), budget_of(config, None), lambda: {"weights": weights})

    return new


@pytest.fixture
def sequence(micro_drafting: Engine) -> Callable[[list[int]], Sequence]:
    def new(ids):
        made = Sequence(ids, GREEDY, 1, 0, (), micro_drafting.tokenizer)
        made.snapshots = ()
        return made

    return new


def prefill(pool: SlotPool, prefixes: KeptPrefixes | None, sequence: Sequence) -> Lease:
    """As the runner does it."""
    prompt = sequence.prompt
    lease = pool.lease(len(prompt) + 1)
    if prefixes is not None:
        prefixes.admitted(sequence, lease)
    for _ in lease.prefill(prompt[lease.length :]):
        if prefixes is not None:
            prefixes.appended(sequence, lease)
    return lease


def contents(pool: SlotPool, lease: Lease, tokens: int) -> list[bytes]:
    """All that is known of a slot after so many tokens, read from the state's arrays, the MTP layer's pages up to the last token
    whose next one is known."""
    with pool.transaction():
        pool.settle()
    state, slot, at = pool.state, lease.slot, np.arange(tokens)
    rows = [np.asarray(leaf)[lease.table[at // 64], :, at % 64] for leaf in jax.tree.leaves(state.kv)]
    rows += [np.asarray(leaf)[lease.table[at[:-1] // 64], :, at[:-1] % 64] for leaf in jax.tree.leaves(state.mtp_kv)]
    width = pool.programs.config.conv_width
    rows += [np.asarray(x[slot]) for x in state.recurrent] + [np.asarray(x[slot, : width - 1]) for x in state.conv]
    rows += [np.asarray(x[slot]) for x in (state.slots.hidden, state.slots.linked, state.slots.length, state.sampling.in_prompt)]
    return [row.tobytes() for row in rows]


def test_restored_states_are_recomputed_ones_bit_for_bit(pool: SlotPool, kept: Open, sequence, tmp_path: Path) -> None:
    """Prompts that part at any token, on a grid line and beside it, some after a restart from disk."""
    prefixes = kept(cache_dir=tmp_path / "c")
    rng, hits = np.random.default_rng(0), 0
    prompts = [IDS, IDS[:129], IDS[:128], [*IDS[:128], 5, *IDS[:60]], [*IDS[:128], 6, *IDS[:90]]]
    prompts += [[*IDS[: (cut := int(rng.integers(0, 250)))], *rng.integers(0, 1024, 250 - cut).tolist()] for _ in range(8)]
    for at, ids in enumerate(prompts):
        with prefill(pool, None, sequence(ids)) as lease:
            wanted = contents(pool, lease, len(ids))
        for _ in range(2):
            if at == 6:
                prefixes.close(save=True)
                prefixes = kept(cache_dir=tmp_path / "c")
            given = sequence(ids)
            with prefill(pool, prefixes, given) as lease:
                assert contents(pool, lease, len(ids)) == wanted
                assert all(mark % 64 == 0 for mark in given.marks)
            hits += prefixes.counters.cached_tokens
        with pool.lease(len(ids)) as lease:
            prefixes.admitted(sequence(ids), lease)
            assert lease.length == len(ids) // 64 * 64  # the end of a prompt is always kept
        prefixes.cache.check()
    assert prefixes.counters.hits_host > 5 and prefixes.counters.hits_disk > 2 and not prefixes.told
