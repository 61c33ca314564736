"""Mixed requests over a prefix cache that lives, fills, starves and restarts: every answer is its cold solo run's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.engine.prefix_settings import open_prefixes
from ninfer_jax.engine.prefixes import NoPrefixes
from ninfer_jax.engine.runner import Runner
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.snapshot_bytes import to_bytes

pytestmark = [pytest.mark.engine, pytest.mark.bits]

SHAPE = dict(context=512, slots=4, prefill_chunk=64, pool=1600)  # four whole slots would be 2,048 tokens
ENGINES = {"f32, no drafts": dict(kv="f32", draft=0), "rk4v4-e8, three drafts": dict(kv="rk4v4-e8", draft=3)}
BUDGETS = (1 << 20, 1 << 24)  # host memory: a few checkpoints, or all
CONTEXT, VOCABULARY = 512, 1024


@dataclass
class Request:
    """cancelled: after so many turns of the runner, or None."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    budget: int
    cancelled: int | None = None

    def sequence(self, engine: Engine) -> Sequence:
        return Sequence(self.prompt, self.params, self.budget, self.seed, (7, 8), engine.tokenizer)

    @property
    def key(self) -> tuple:
        return tuple(self.prompt), repr(self.params), self.seed, self.budget


class Callers:
    """Agents: they go on, fork anywhere, edit what they said last, ask the same again, begin with a common system text."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.systems = [self.noise(length) for length in (64, 128, 150)]
        self.known: list[list[int]] = []

    def noise(self, count: int) -> list[int]:
        return self.rng.integers(10, VOCABULARY, count).tolist()

    def next(self) -> Request:
        rng = self.rng
        base = self.known[-1 - int(rng.integers(min(len(self.known), 12)))] if self.known else []
        move = rng.choice(["on", "on", "on", "fork", "edit", "again", "new"]) if base else "new"
        if move == "new" or len(base) > CONTEXT - 80:
            prompt = self.systems[rng.integers(3)] + self.noise(int(rng.integers(0, 60)))
        elif move == "on":
            prompt = base + self.noise(int(rng.integers(1, 90)))
        elif move == "fork":
            # On a line of the grid, beside one, or anywhere.
            cut = int(rng.choice([rng.integers(1, len(base)), max(1, len(base) // 64 * 64 + rng.integers(-1, 2))]))
            prompt = base[:cut] + self.noise(int(rng.integers(0, 60)))
        elif move == "edit":
            at = max(0, len(base) - int(rng.integers(1, 60)))
            prompt = base[:at] + self.noise(int(rng.integers(1, 4))) + base[at + 3 :]
        else:
            prompt = list(base)
        prompt = prompt[: CONTEXT - 40]
        penalty = float(rng.choice([0.0, 0.0, 0.7]))
        temperature = float(rng.choice([0.0, 1.0]))
        params = SamplingParams(temperature=temperature, presence_penalty=penalty, repetition_penalty=1.0 + penalty / 5)
        cancelled = int(rng.integers(0, 12)) if rng.random() < 0.1 else None
        return Request(prompt, params, int(rng.integers(1 << 40)), int(rng.integers(1, 30)), cancelled)

    def heard(self, request: Request, tokens: list[int]) -> None:
        self.known = [*self.known[-60:], request.prompt + tokens]


def alone(engine: Engine, request: Request) -> list[int]:
    """The tokens of the request in an engine without a cache, with nobody beside it."""
    runner = engine.runner
    runner.prefixes, sequence = NoPrefixes(), request.sequence(engine)
    runner.submit(sequence)
    while not sequence.finished:
        runner.advance()
    assert sequence.stats.cached_tokens == 0
    return sequence.tokens


def serve(runner: Runner, engine: Engine, requests: list[Request]) -> list[Sequence]:
    """All at once, as far as there are slots, some cancelled on the way."""
    sequences = [request.sequence(engine) for request in requests]
    for sequence in sequences:
        runner.submit(sequence)
    turns = 0
    while not all(s.finished for s in sequences):
        for request, sequence in zip(requests, sequences, strict=True):
            if request.cancelled == turns and not sequence.finished:
                runner.cancel(sequence)
        runner.advance()
        turns += 1
    return sequences


def check_kept(engine: Engine, prefixes: KeptPrefixes, tokens: list[int]) -> bool:
    """Whether something is kept of `tokens`; it is at a line of the grid, and has the bits of prefilling them."""
    with prefixes.cache.find(tokens, counted=False) as hit:
        kept = hit.load() if hit.length else None
    if kept is None:
        return False
    assert kept.length % prefixes.grid == 0, f"a checkpoint of {kept.length} tokens"
    with engine.runner.lease(kept.length) as lease:
        for _ in lease.prefill(tokens[: kept.length]):
            pass
        assert np.asarray(kept.state).tobytes() == to_bytes(lease.snapshot()).tobytes()
    return True


def check(engine: Engine, folder: Path, count: int, seed: int) -> None:
    """`count` requests; the state ends as it began."""
    runner, callers, rng = engine.runner, Callers(seed), np.random.default_rng(seed)
    opened, truth, served, hits, cached, checked = 0, {}, 0, 0, 0, 0
    compilations = engine.compilations

    def opened_again() -> KeptPrefixes:
        nonlocal opened
        opened += 1
        config = EngineConfig(prefix_cache="exact", cache_bytes=BUDGETS[opened % 2], cache_dir=folder, cache_dir_bytes=1 << 23)
        return open_prefixes(runner.pool, config, "exact", BUDGETS[opened % 2], lambda: {"engine": "this"})

    prefixes = opened_again()
    while served < count:
        requests = [callers.next() for _ in range(rng.integers(1, 7))]
        for request in requests:
            if request.key not in truth:
                truth[request.key] = alone(engine, request)
        runner.prefixes = prefixes
        for request, sequence in zip(requests, serve(runner, engine, requests), strict=True):
            wanted = truth[request.key]
            if sequence.finish_reason == "cancelled":
                assert sequence.tokens == wanted[: len(sequence.tokens)]
            else:
                assert sequence.tokens == wanted, f"request {served}: {sequence.stats.cached_tokens} tokens were cached"
            cached += sequence.stats.cached_tokens
            hits += sequence.stats.cached_tokens > 0
            callers.heard(request, sequence.tokens)
            served += 1
        for _ in range(rng.integers(0, 8)):
            runner.idle()
        prefixes.cache.check()
        checked += check_kept(engine, prefixes, callers.known[-1])
        if rng.random() < 0.08:
            prefixes.close(save=bool(rng.integers(2)))
            prefixes = opened_again()
    assert not runner.faults and not prefixes.told and opened > 1
    assert hits > 0.3 * count and cached > 20 * count and checked > 0.1 * count
    prefixes.close(save=False)
    runner.prefixes = NoPrefixes()
    alone(engine, requests[0])
    runner.pool.tidy()
    assert runner.busy == 0 and runner.free_tokens == runner.pool_tokens
    assert engine.compilations == compilations


@pytest.fixture(params=ENGINES, ids=list(ENGINES))
def engine(request: pytest.FixtureRequest, engine_for: Callable[..., Engine], micro_path: Path) -> Engine:
    return engine_for(micro_path, quickly=True, **SHAPE, **ENGINES[request.param])


def test_a_hundred_mixed_requests_are_answered_as_without_a_cache(engine: Engine, tmp_path: Path) -> None:
    check(engine, tmp_path, 100, 1)


@pytest.mark.full
def test_two_thousand_mixed_requests_are_answered_as_without_a_cache(engine: Engine, tmp_path: Path) -> None:
    check(engine, tmp_path, 2000, 2)
