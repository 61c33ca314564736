"""The change that a KV format makes in the next-token distributions of decode steps.

Both engines read the same text. At each depth the tokens before it are prefilled, with keys and values in the engine's own
format, and the next ones go through decode steps one by one, the true token fed each time whatever the model would have
said. At every step the whole distribution is compared with that of the reference format: Kullback-Leibler divergence
sum p_ref (log p_ref - log p) in nats, and whether the most likely token is the same.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.evaluate.forced import ForcedDecoder, Progress, log_softmax


@dataclass(frozen=True)
class Divergence:
    """One format at one depth, over `tokens` decode steps. kl: mean nats a token, kl_error: its standard error taking steps
    as independent, kl_median, kl_p99, kl_max; same_top: share of steps with the reference's most likely token; loss and
    reference_loss: mean -log p of the true next token, nats."""

    kv: str
    depth: int
    tokens: int
    kl: float
    kl_error: float
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    loss: float
    reference_loss: float


def decode_logprobs(
    engine: Engine, ids: SequenceOf[int], depths: SequenceOf[int], tokens: int, progress: Progress | None = None
) -> list[np.ndarray]:
    """For each depth d, float32 `[tokens, tokenizer ids]`: log-probabilities after ids[: d + 1], ids[: d + 2], ..., the last
    token of each fed by a decode step. d = 0 prefills nothing. ValueError when the text or the context is too short.

    They stay on the host: 4 bytes x tokens x ids a depth (509 MB for 512 tokens of a vocabulary of 248,320).
    """
    check_text(ids, depths, tokens)
    decoder, found = ForcedDecoder(engine), []
    for at, depth in enumerate(depths):
        rows = np.empty((tokens, engine.programs.config.vocab_size), np.float32)
        with decoder.sequence(depth + tokens) as sequence:
            if depth:
                sequence.prefill(ids[:depth])
            for n in range(tokens):
                rows[n] = sequence.step(ids[depth + n])
                if progress:
                    progress(at * tokens + n + 1, len(depths) * tokens)
        found.append(log_softmax(rows, engine.tokenizer.vocab_size))
    return found


def check_text(ids: SequenceOf[int], depths: SequenceOf[int], tokens: int) -> None:
    """ValueError unless the text has `tokens` tokens and the one after them at every depth."""
    needed = max(depths) + tokens + 1
    if len(ids) < needed:
        most = max(depths)
        raise ValueError(f"the text has {len(ids)} tokens, depth {most} and {tokens} more need {needed}; give a longer text")


def compare(kv: str, depth: int, reference: np.ndarray, other: np.ndarray, targets: SequenceOf[int]) -> Divergence:
    """Log-probabilities `[tokens, ids]` of both, and the true next token of each row."""
    kl = kl_divergence(reference, other)
    rows, expected = np.arange(len(kl)), np.asarray(targets)
    error = float(kl.std(ddof=1) / np.sqrt(len(kl))) if len(kl) > 1 else 0.0
    losses = [float(-x[rows, expected].mean(dtype=np.float64)) for x in (other, reference)]
    return Divergence(
        kv=kv,
        depth=depth,
        tokens=len(kl),
        kl=float(kl.mean()),
        kl_error=error,
        kl_median=float(np.median(kl)),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        same_top=float((reference.argmax(1) == other.argmax(1)).mean()),
        loss=losses[0],
        reference_loss=losses[1],
    )


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) of each row of log-probabilities `[rows, ids]`, nats, summed in float64. The sum of p - q, zero
    but for the rounding of the inputs, is taken out, so that every term is positive and small values keep their digits."""
    out = np.empty(len(reference))
    for row, (p, q) in enumerate(zip(reference, other, strict=True)):
        d = q.astype(np.float64) - p
        out[row] = (np.exp(p.astype(np.float64)) * (np.expm1(d) - d)).sum()
    return out
