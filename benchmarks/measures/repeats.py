"""What a stretch of text gains from having stood in the context before, by how far back it stood.

A run of text ends in a stretch of `STRETCH` tokens from elsewhere. Once the same stretch also stands `distance` tokens before,
in place of what the run has there; once it does not. The mean -log p of the last stretch's tokens, without minus with, is the
help of the repeat. Everything else, positions included, is the same in both. The first token of the stretch is not counted: no
repeat can announce it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.evaluate.forced import log_softmax

STRETCH, LEAD = 32, 64  # tokens that are repeated, tokens before their first occurrence
DISTANCES = (64, 256, 1024, 4096)


@dataclass(frozen=True)
class Repeat:
    """source: "text", or "random" for uniform ids. first, second, without: mean -log p a token, nats, of the first and second
    occurrence, and of the second where there is no first; helps: without - second of each trial."""

    source: str
    distance: int
    first: float
    second: float
    without: float
    helps: list[float]


def measure(engine: Engine, text: Sequence[int], trials: int, progress: Callable[[int, int], None] | None = None) -> list[Repeat]:
    """Every distance with stretches of the text, and the shortest with random ids; `trials` each, the same for every engine.
    ValueError if the text is too short."""
    found = []
    kinds = [("text", distance) for distance in DISTANCES] + [("random", DISTANCES[0])]
    for at, (source, distance) in enumerate(kinds):
        rng, nats = random.Random(distance), np.empty((trials, 3))
        for trial in range(trials):
            run, stretch = _draw(rng, text, distance, engine.tokenizer.vocab_size, source == "random")
            again = run[:LEAD] + stretch + run[LEAD + STRETCH :] + stretch
            seen, blind = _nats(engine, again), _nats(engine, run + stretch)
            nats[trial] = (seen[LEAD : LEAD + STRETCH - 1].mean(), seen[-STRETCH + 1 :].mean(), blind[-STRETCH + 1 :].mean())
            if progress:
                progress(at * trials + trial + 1, len(kinds) * trials)
        first, second, without = nats.mean(axis=0).tolist()
        found.append(Repeat(source, distance, first, second, without, (nats[:, 2] - nats[:, 1]).tolist()))
    return found


def _draw(rng: random.Random, text: Sequence[int], distance: int, ids: int, uniform: bool) -> tuple[list[int], list[int]]:
    """A run of LEAD + distance tokens of the text, and a stretch that is not from the run."""
    length = LEAD + distance
    if len(text) < length + 2 * STRETCH:
        needed = length + 2 * STRETCH
        raise ValueError(f"the text has {len(text)} tokens, repeats at {distance} need {needed}; give a longer text")
    start = rng.randrange(len(text) - length + 1)
    run = list(text[start : start + length])
    if uniform:
        return run, [rng.randrange(ids) for _ in range(STRETCH)]
    at = rng.choice([n for n in range(len(text) - STRETCH + 1) if n + STRETCH <= start or n >= start + length])
    return run, list(text[at : at + STRETCH])


def _nats(engine: Engine, ids: list[int]) -> np.ndarray:
    """-log p of ids[1], ids[2], ..."""
    logp = log_softmax(engine.score(ids[:-1]), engine.tokenizer.vocab_size)
    return -logp[np.arange(len(logp)), ids[1:]].astype(np.float64)
