"""Needles in a haystack: sentences with a number each, all of them in one text, asked for one after another.

The question names the key and never the number, and the numbers are drawn anew for each haystack, so nothing but the
needle in the text gives the answer away; the other needles are there to be confused with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine import Engine
from ninfer_jax.evaluate.forced import ForcedDecoder, Progress, log_softmax

KEYS = (
    "Verona",
    "Padua",
    "Milan",
    "Athens",
    "Venice",
    "Messina",
    "Vienna",
    "Ephesus",
    "Cyprus",
    "Elsinore",
    "Dunsinane",
    "Windsor",
    "London",
    "Rome",
    "Troy",
    "Tyre",
    "Navarre",
    "Illyria",
    "Sicilia",
    "Bohemia",
)
_DIGITS = 5
_REPLY = 24  # tokens in which the number must turn up


@dataclass(frozen=True)
class Cell:
    """One length and depth. found: share of questions whose reply held the number. answer_nats: mean -log p a token of the
    number after the question, nats, None where messages are used. blind_nats: the same with the needle taken out.
    """

    length: int
    depth: float
    asked: int
    found: float
    answer_nats: float | None
    blind_nats: float | None

    @property
    def help_nats(self) -> float:
        """Nats a token by which the needle lowers the answer's -log p; NaN where messages are used."""
        return math.nan if self.blind_nats is None or self.answer_nats is None else self.blind_nats - self.answer_nats


@dataclass(frozen=True)
class Haystack:
    """ids: the text with all needles; keys and numbers: in the order of the depths; spans: where each needle lies in ids."""

    ids: list[int]
    keys: SequenceOf[str]
    numbers: list[str]
    spans: list[tuple[int, int]]

    def without(self, at: int) -> list[int]:
        start, end = self.spans[at]
        return self.ids[:start] + self.ids[end:]


def question(key: str) -> str:
    """The text that a base model is to continue."""
    return f"\nThe secret number of {key} is"


def haystack(
    encode: Callable[[str], list[int]], text: SequenceOf[int], length: int, depths: SequenceOf[float], seed: int
) -> Haystack:
    """About `length` tokens: a stretch of the text with one needle at each depth (0: the beginning, 1: the end). encode: text
    to ids. The seed chooses keys, numbers and the stretch. ValueError if the text or `length` is too short."""
    if len(depths) > len(KEYS):
        raise ValueError(f"depths: {len(depths)}, there are {len(KEYS)} different needles")
    rng = random.Random(seed)
    keys = rng.sample(KEYS, len(depths))
    numbers = [str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in keys]
    needles = [encode(f"{question(key)} {number}.\n") for key, number in zip(keys, numbers, strict=True)]
    rest = length - sum(map(len, needles))
    if rest < len(depths):
        raise ValueError(f"length {length} has no room for {len(depths)} needles of about {len(needles[0])} tokens")
    if rest > len(text):
        raise ValueError(f"the text has {len(text)} tokens, length {length} needs {rest}; give a longer text")
    start = rng.randrange(len(text) - rest + 1)
    hay = list(text[start : start + rest])
    ids: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    used = 0
    for at in sorted(range(len(depths)), key=lambda n: depths[n]):
        upto = round(depths[at] * rest)
        ids += hay[used:upto]
        spans[at] = (len(ids), len(ids) + len(needles[at]))
        ids, used = ids + needles[at], upto
    return Haystack(ids + hay[used:], keys, numbers, [spans[n] for n in range(len(depths))])


def needle_grid(
    engine: Engine,
    text: SequenceOf[int],
    lengths: SequenceOf[int],
    depths: SequenceOf[float],
    trials: int,
    seed: int,
    chat: bool,
    progress: Progress | None = None,
) -> list[Cell]:
    """Every length and depth, `trials` haystacks each. chat: ask in messages, without reasoning; else the text is continued,
    greedily in both. ValueError if a prompt does not fit the context."""
    decoder = None if chat else ForcedDecoder(engine)
    if (needed := max(lengths) + 64) > engine.context:
        raise ValueError(f"context holds {engine.context} tokens, length {max(lengths)} needs {needed}; load a larger context")
    cells, done = [], 0
    for length in lengths:
        found = np.zeros((len(depths), trials))
        nats = np.zeros((len(depths), trials, 2))
        for trial in range(trials):
            made = haystack(engine.tokenizer.encode, text, length, depths, seed + trial)
            for at, (key, number) in enumerate(zip(made.keys, made.numbers, strict=True)):
                found[at, trial] = number in _reply(engine, made.ids, key, chat)
                if decoder:
                    nats[at, trial] = [answer_nats(decoder, ids, key, number) for ids in (made.ids, made.without(at))]
                done += 1
                if progress:
                    progress(done, len(lengths) * len(depths) * trials)
        for at, depth in enumerate(depths):
            seen, blind = (None, None) if chat else (float(x) for x in nats[at].mean(axis=0))
            cells.append(Cell(length, depth, trials, float(found[at].mean()), seen, blind))
    return cells


def answer_nats(decoder: ForcedDecoder, ids: list[int], key: str, number: str) -> float:
    """Mean -log p a token of the number, fed by decode steps after the text and the question."""
    encode, valid = decoder.engine.tokenizer.encode, decoder.engine.tokenizer.vocab_size
    prompt, answer = ids + encode(question(key)), encode(f" {number}")
    with decoder.sequence(len(prompt) + len(answer)) as sequence:
        rows = [sequence.prefill(prompt)]
        rows += [sequence.step(token) for token in answer[:-1]]
    logp = log_softmax(np.stack(rows), valid)
    return float(-logp[np.arange(len(answer)), answer].mean())


def _reply(engine: Engine, ids: list[int], key: str, chat: bool) -> str:
    params = SamplingParams(temperature=0, max_new_tokens=_REPLY)
    if not chat:
        return engine.generate(ids + engine.tokenizer.encode(question(key)), params).text
    asked = f"{engine.tokenizer.decode(ids)}\n\nWhat is the secret number of {key}? Answer with the number alone."
    return engine.generate([{"role": "user", "content": asked}], params, enable_thinking=False).text
