"""The prefix cache at work on one engine's slots: what it brings back is what would have been prefilled, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.cache.container import difference
from ninfer_jax.engine import sessions
from ninfer_jax.engine.identity import identity_of
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.engine.prefix_settings import open_prefixes
from ninfer_jax.engine.prefixes import NoPrefixes
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.slot_pool import Lease, SlotPool
from ninfer_jax.engine.snapshot_bytes import from_bytes
from ninfer_jax.files import FileError
from ninfer_jax.planning.kept import budget_of, mode_of
from ninfer_jax.programs.setup import model_of, resolve

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
    return lambda ids: Sequence(ids, GREEDY, 1, 0, (), micro_drafting.tokenizer)


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


def ended(prefixes: KeptPrefixes, given: Sequence, lease: Lease, tokens: list[int]) -> None:
    """An answer of these tokens, as far as the cache is told."""
    given.tokens.extend(tokens)
    given.exact = True
    prefixes.ended(given, lease)


def test_an_answer_is_settled_in_idle_time_and_gives_way(pool: SlotPool, kept: Open, sequence) -> None:
    prefixes, whole = kept(), IDS[:200]
    given = sequence(IDS[:100])
    with prefill(pool, prefixes, given) as lease:
        ended(prefixes, given, lease, IDS[100:200])
    assert prefixes.known(whole) == 64
    assert prefixes.idle() and pool.busy == 1  # a chunk of it
    prefixes.give_way()
    assert pool.busy == 0 and prefixes.known(whole) == 64
    while prefixes.idle():
        pass
    assert pool.busy == 0 and prefixes.known(whole) == 192
    with prefill(pool, None, sequence(IDS)) as lease:
        wanted = contents(pool, lease, len(IDS))
    with prefill(pool, prefixes, sequence(IDS)) as lease:
        assert contents(pool, lease, len(IDS)) == wanted
    assert (prefixes.counters.hits_host, prefixes.counters.cached_tokens, prefixes.counters.lookups) == (1, 192, 2)


def test_a_restore_that_fails_is_a_miss(pool: SlotPool, kept: Open, sequence, tmp_path: Path) -> None:
    prefixes = kept(cache_dir=tmp_path)
    with prefill(pool, prefixes, sequence(IDS)):
        prefixes.close(save=True)
    with prefill(pool, None, sequence(IDS)) as lease:
        wanted = contents(pool, lease, len(IDS))
    again = kept(cache_dir=tmp_path)
    for file in tmp_path.iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with prefill(pool, again, sequence(IDS)) as lease:
        assert contents(pool, lease, len(IDS)) == wanted
    counters = again.counters
    assert counters.failed and not counters.hits_host + counters.hits_disk + counters.cached_tokens
    assert again.told and all("is damaged; it is passed over" in line for line in again.told)


def test_a_budget_that_holds_no_checkpoint_is_refused(pool: SlotPool, kept: Open) -> None:
    need = pool.programs.staging_bytes + pool.page_bytes
    with pytest.raises(
        ValueError, match=f"^cache_bytes: {need - 1:,} bytes of host memory hold no checkpoint of this model: one takes"
    ):
        kept(cache_bytes=need - 1)
    kept(cache_bytes=need)


def test_a_cache_of_other_weights_is_passed_over_by_name(pool: SlotPool, kept: Open, sequence, tmp_path: Path) -> None:
    prefixes = kept(cache_dir=tmp_path)
    with prefill(pool, prefixes, sequence(IDS)):
        prefixes.close(save=True)
    other = kept(cache_dir=tmp_path, weights="v")
    with prefill(pool, other, sequence(IDS)):
        assert not other.counters.cached_tokens
    assert other.told and all("is of another engine: weights is w, here v" in line for line in other.told)


def test_a_conversation_goes_on_from_its_file(pool: SlotPool, kept: Open, sequence, tmp_path: Path) -> None:
    file, messages = tmp_path / "talk", [{"role": "user", "content": "hello"}]
    assert sessions.save(kept(), IDS, messages, file) == 192
    prefixes = kept()
    assert sessions.load(prefixes, file) == messages
    with prefill(pool, None, sequence(IDS)) as lease:
        wanted = contents(pool, lease, len(IDS))
    with pool.lease(len(IDS)) as lease:
        prefixes.admitted(sequence(IDS), lease)
        assert lease.length == 192
        for _ in lease.prefill(IDS[192:]):
            pass
        assert contents(pool, lease, len(IDS)) == wanted


def test_a_file_that_is_no_conversation_of_this_engine_is_refused_by_name(pool: SlotPool, kept: Open, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    sessions.save(kept(), IDS[:100], IDS[:100], file)
    whole = file.read_bytes()
    with pytest.raises(FileError, match=r"^session .*talk is of another engine: weights is w, here v$"):
        sessions.load(kept(weights="v"), file)
    for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + bytes([whole[-1] ^ 1]), b"x" * 100):
        file.write_bytes(damaged)
        with pytest.raises(FileError, match=r"^session .*talk (is|has) "):
            sessions.load(kept(), file)
    with pytest.raises(FileError, match=r"^session .*nowhere cannot be read \(No such file or directory\)$"):
        sessions.load(kept(), tmp_path / "nowhere")
    file.write_bytes(whole)
    with pytest.raises(FileError, match=r"^session .*no/talk: No such file or directory$"):
        sessions.save(kept(), IDS[:100], IDS[:100], tmp_path / "no" / "talk")
    assert sessions.load(kept(), file) == IDS[:100]


def test_fast_mode_goes_on_from_where_the_answer_ended(micro_drafting: Engine, pool: SlotPool, kept: Open) -> None:
    """At any length; of the tokens that were drawn only the last is prefilled. What waited is in the state that was kept."""
    runner, params = micro_drafting.runner, SamplingParams(temperature=0.0, max_new_tokens=33, ignore_eos=True)
    runner.prefixes = prefixes = kept("fast")
    try:
        first = micro_drafting.generate(IDS[:100], params)
        whole = [*IDS[:100], *first.tokens]
        assert prefixes.known(whole) == len(whole) - 1
        second = micro_drafting.generate([*whole, 5, 6, 7], params)
        assert second.stats.cached_tokens == len(whole) - 1 and not prefixes.idle()
        with prefixes.cache.find(whole) as hit:
            state = from_bytes(hit.load().state, pool.programs.result("snapshot")[1])
    finally:
        runner.prefixes = NoPrefixes()
    # The same tokens by prefill alone: as far as rounding goes, the same state.
    with pool.lease(200) as lease:
        for _ in lease.prefill(whole[:-1]):
            pass
        prefilled = jax.tree.map(np.asarray, lease.snapshot())
    assert (state.length, bool(state.linked), bool(prefilled.linked)) == (prefilled.length, False, True)
    for ours, theirs in zip(state.recurrent + state.conv, prefilled.recurrent + prefilled.conv, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * float(np.abs(theirs).max()))


def test_chunks_end_where_a_conversation_comes_back(micro_drafting: Engine, pool: SlotPool, kept: Open) -> None:
    """At the end of the system text, the starts of the last two user turns, and where the answer's turn opens, rounded down."""
    turns = [{"role": "system", "content": "Be brief. " * 12}]
    for text in ("one " * 20, "two " * 20, "three " * 9):
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    ids = micro_drafting.prompt_ids(turns[:-1])
    opens = [at for at, token in enumerate(ids) if token == micro_drafting.tokenizer.token_id("<|im_start|>")]
    given = Sequence(ids, GREEDY, 1, 0, (), micro_drafting.tokenizer, snapshots=(70,))
    with pool.lease(len(ids)) as lease:
        kept().admitted(given, lease)
    _, first, _, second, _, third, answer = opens
    assert given.marks == tuple(sorted({length // 64 * 64 for length in (70, first, second, third, answer)}))


def test_an_engine_of_another_kind_is_told_by_the_field_that_differs() -> None:
    class Weights:
        def __init__(self, digest: str):
            self._digest = digest

        def digest(self) -> str:
            return self._digest

    def identity(mode: str = "exact", weights: str = "w", **fields: object) -> dict[str, str | int]:
        setup = resolve(*model_of("tiny"), EngineConfig(**{"context": 512, "draft": 0} | fields), "cpu")
        return identity_of(setup, setup.programs(), Weights(weights), mode)

    mine = identity()
    assert mine == identity() and all(isinstance(value, str | int) for value in mine.values())
    for name, other in {
        "weights": identity(weights="v"),
        "mode": identity("fast"),
        "kv": identity(kv="rk4v4"),
        "dtype": identity(dtype="bfloat16"),
        "mtp": identity(draft=1),
        "prefill_chunk": identity(prefill_chunk=64),
        "slots": identity(slots=2),
    }.items():
        assert difference(other, mine).startswith(f"{name} is ")
    # What only the last bits hang on keeps nobody from going on in fast mode.
    assert identity("fast") == identity("fast", slots=2, prefill_chunk=64)
    # Looking drafts up leaves nothing in a page.
    assert identity("fast") == identity("fast", draft=2, drafter="lookup") != identity("fast", draft=2, drafter="mtp+lookup")
