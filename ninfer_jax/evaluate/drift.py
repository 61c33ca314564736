"""Whether rounding piles up in the recurrent states: their error, and that of the logits, over the position in a text.

Two ways through the engine, prefill (the delta rule in chunks) and decode steps (token by token), against a float64 model
that knows no chunks; or, for models too large for that, prefill against decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.evaluate.divergence import kl_divergence
from ninfer_jax.evaluate.forced import ForcedDecoder, Progress, log_softmax
from ninfer_jax.evaluate.reference64 import Float64Model

REFERENCES = ("float64", "decode")
Point = tuple[list[np.ndarray], np.ndarray]  # recurrent states and the last token's logits


@dataclass(frozen=True)
class Drift:
    """After `position` tokens. path: "prefill" or "decode". state_error: |S - S_ref| / |S_ref| in the Frobenius norm, one a
    GDN layer; logits_error: the same of the logits of the tokenizer's ids; kl: of the reference's distribution to this one,
    nats."""

    path: str
    reference: str
    position: int
    state_error: list[float]
    logits_error: float
    kl: float


def state_drift(
    engine: Engine, ids: SequenceOf[int], tokens: int, every: int, reference: str, progress: Progress | None = None
) -> list[Drift]:
    """Errors after every `every` of the first `tokens` tokens. reference: "float64" or "decode". progress counts tokens over
    all passes. ValueError for an unknown reference, a text or context too short, or `every` no multiple of the prefill chunk."""
    chunk, valid = engine.programs.chunk, engine.tokenizer.vocab_size
    if reference not in REFERENCES:
        raise ValueError(f"reference is {reference!r}, known are {', '.join(REFERENCES)}")
    if every % chunk or tokens % every:
        raise ValueError(f"every is {every}: it must be a multiple of the prefill chunk, {chunk}, and divide tokens, {tokens}")
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {tokens} are asked for; give a longer text")
    if not engine.model_config.gdn_layers:
        raise ValueError("drift: this model has no recurrent state")
    passes = 3 if reference == "float64" else 2
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, passes * tokens)

    blocks = [list(ids[start : start + every]) for start in range(0, tokens, every)]
    decoder = ForcedDecoder(engine)
    paths = {"prefill": list(_prefilled(decoder, blocks, tell)), "decode": list(_stepped(decoder, blocks, tell))}
    exact = list(_in_float64(engine, blocks, tell)) if reference == "float64" else paths.pop("decode")
    return [
        _drift(path, reference, (at + 1) * every, point, exact[at], valid)
        for path, points in paths.items()
        for at, point in enumerate(points)
    ]


def _prefilled(decoder: ForcedDecoder, blocks: list[list[int]], tell) -> Iterator[Point]:
    with decoder.sequence(sum(map(len, blocks))) as sequence:
        for block in blocks:
            logits = sequence.prefill(block)
            yield sequence.recurrent(), logits
            tell(len(block))


def _stepped(decoder: ForcedDecoder, blocks: list[list[int]], tell) -> Iterator[Point]:
    with decoder.sequence(sum(map(len, blocks))) as sequence:
        for block in blocks:
            for token in block:
                logits = sequence.step(token)
                tell(1)
            yield sequence.recurrent(), logits


def _in_float64(engine: Engine, blocks: list[list[int]], tell) -> Iterator[Point]:
    model = Float64Model(engine.programs.build(engine.runner.pool.parameters))
    for block in blocks:
        logits = model.read(block)
        yield [state.copy() for state in model.states], logits
        tell(len(block))


def _drift(path: str, reference: str, position: int, point: Point, exact: Point, valid: int) -> Drift:
    (states, logits), (true_states, true_logits) = point, exact
    ours, theirs = (log_softmax(x[None], valid) for x in (logits, true_logits))
    return Drift(
        path=path,
        reference=reference,
        position=position,
        state_error=[_relative(s, t) for s, t in zip(states, true_states, strict=True)],
        logits_error=_relative(logits[:valid], true_logits[:valid]),
        kl=float(kl_divergence(theirs, ours)[0]),
    )


def _relative(x: np.ndarray, exact: np.ndarray) -> float:
    exact = exact.astype(np.float64)
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))
