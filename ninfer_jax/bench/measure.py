"""One run of a cell: as many requests as slots, through the engine's own runner, its clocks read at the right places."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import jax

from ninfer_jax.bench.matrix import Cell
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine import Engine
from ninfer_jax.engine.sequence import Sequence


@dataclass(frozen=True)
class Sample:
    """One run, over all slots together; times in seconds.

    prefill_tokens, prefill_s: of the prompts behind the depth, up to each first token; slots prefill one after another,
    so their times add up. fill_s: filling the depths, in no other time. ttft_s: from the moment all requests are handed
    in to the last slot's first token, fills taken off. decode_tokens, decode_s: tokens after each slot's first, and from
    the last first token to the last token. rounds: decode rounds, of all slots in sum. drafted, accepted: MTP proposals
    and those that became output. energy_j: joules of the decode time, None without a meter.
    """

    prefill_tokens: int
    prefill_s: float
    fill_s: float
    ttft_s: float
    decode_tokens: int
    decode_s: float
    rounds: int
    drafted: int
    accepted: int
    energy_j: float | None


@dataclass(eq=False)
class _Request(Sequence):
    """A sequence that notes when its prefill started, when its depth was filled, and when its first token was there."""

    started_at: float = 0.0
    filled_at: float = 0.0
    first_at: float = 0.0
    on_first: Callable[[], None] | None = None

    def start_clock(self) -> None:
        super().start_clock()
        self.started_at = self.filled_at = time.perf_counter()

    def first_token(self) -> None:
        super().first_token()
        self.first_at = time.perf_counter()
        if self.on_first is not None:
            self.on_first()


def measure(
    engine: Engine,
    cell: Cell,
    texts: SequenceOf[SequenceOf[int]],
    energy: Callable[[], float] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> Sample:
    """Run the cell once, greedily and past end tokens. texts: `[slots]` of depth + prompt token ids, all different.
    energy: joules so far. tell: called with (tokens prefilled or generated, in all)."""
    runner = engine.runner
    if len(texts) != cell.slots or any(len(text) != cell.depth + cell.prompt for text in texts):
        raise ValueError(f"texts must be {cell.slots} of {cell.depth + cell.prompt} tokens")
    params = SamplingParams(temperature=0, max_new_tokens=cell.gen, ignore_eos=True)
    requests = [_Request(list(text), params, cell.gen, 0, (), engine.tokenizer) for text in texts]
    joules: list[float] = []
    if energy is not None:
        requests[-1].on_first = lambda: joules.append(energy())

    def prefilled(request: Sequence, done: int) -> None:
        assert isinstance(request, _Request)
        if done == cell.depth:
            jax.block_until_ready(runner.state)  # chunks are only queued so far
            request.filled_at = time.perf_counter()
        report()

    def report() -> None:
        if tell:
            tell(sum(r.prefilled + len(r.tokens) for r in requests), cell.slots * cell.need)

    jax.block_until_ready(runner.state)  # a round started ahead for the run before may still be at work
    handed_in = time.perf_counter()
    try:
        for request in requests:  # one whole prompt after another, and no round before the last
            runner.submit(request)
            runner.prefill(prefilled)
        while not all(r.finished for r in requests):
            runner.round()
            report()
        if energy is not None:
            joules.append(energy())
    finally:
        for request in requests:
            if not request.finished:
                runner.cancel(request)
    if any(len(r.tokens) != cell.gen for r in requests):
        raise RuntimeError(f"{cell}: the engine gave {[len(r.tokens) for r in requests]} tokens a slot instead of {cell.gen}")
    return _sample(cell, requests, handed_in, joules[1] - joules[0] if joules else None)


def _sample(cell: Cell, requests: list[_Request], handed_in: float, energy_j: float | None) -> Sample:
    fills = [r.filled_at - r.started_at for r in requests]
    last_first = max(r.first_at for r in requests)
    return Sample(
        prefill_tokens=cell.slots * cell.prompt,
        prefill_s=sum(r.stats.prefill_s - fill for r, fill in zip(requests, fills, strict=True)),
        fill_s=sum(fills),
        ttft_s=last_first - handed_in - sum(fills),
        decode_tokens=cell.slots * (cell.gen - 1),
        decode_s=max(r.first_at + r.stats.decode_s for r in requests) - last_first,
        rounds=sum(r.stats.rounds for r in requests),
        drafted=sum(r.stats.drafted for r in requests),
        accepted=sum(r.stats.accepted for r in requests),
        energy_j=energy_j,
    )
