"""Loss on a text: sliding windows through the prefill program, every token scored once."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.evaluate.forced import Progress, log_softmax


@dataclass(frozen=True)
class Loss:
    """tokens: scored ones, all but the text's first. text_bytes: UTF-8 bytes that they stand for. nats: their summed -log p.
    window, stride: tokens of a window, and those of it that are new; a token in a later window has at least window - stride
    tokens before it."""

    kv: str
    tokens: int
    text_bytes: int
    nats: float
    nats_per_token: float
    nats_per_byte: float
    perplexity: float
    window: int
    stride: int


def text_loss(engine: Engine, ids: SequenceOf[int], window: int, stride: int, progress: Progress | None = None) -> Loss:
    """The loss of ids. A window's logits are on the host together: 4 bytes x window x vocabulary rows. ValueError for windows
    that do not fit the engine or each other."""
    if not 1 <= stride <= window:
        raise ValueError(f"stride is {stride}, it must be from 1 to the window of {window}")
    if window > engine.context:
        raise ValueError(f"window is {window}, the context holds {engine.context}")
    nats = -token_logprobs(engine, ids, window, stride, progress).sum()
    scored, text_bytes = len(ids) - 1, len(engine.tokenizer.decode_bytes(ids[1:], skip_special=False))
    return Loss(
        kv=engine.programs.shape.kv,
        tokens=scored,
        text_bytes=text_bytes,
        nats=float(nats),
        nats_per_token=float(nats / scored),
        nats_per_byte=float(nats / text_bytes),
        perplexity=math.exp(nats / scored),
        window=window,
        stride=stride,
    )


def token_logprobs(engine: Engine, ids: SequenceOf[int], window: int, stride: int, progress: Progress | None = None) -> np.ndarray:
    """log p of ids[1], ids[2], ..., float64 `[len(ids) - 1]`."""
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens, at least 2 are needed: the first one is only history")
    valid, out, done = engine.tokenizer.vocab_size, np.empty(len(ids) - 1), 0
    while done < len(out):
        # The first window is new throughout; later ones begin window - stride tokens before what is new.
        start = max(0, done - (window - stride))
        part = ids[start : start + window + 1]
        logits = engine.score(part[:-1])[done - start :]
        logp = log_softmax(logits, valid)
        out[done : done + len(logp)] = logp[np.arange(len(logp)), part[done - start + 1 :]]
        done += len(logp)
        if progress:
            progress(done, len(out))
    return out
