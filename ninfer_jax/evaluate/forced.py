"""Teacher-forced decode steps with all logits, through an engine's own slots.

A decode round gives out at most the 20 most likely tokens, because nobody who generates needs more. The program `step` computes
what a round does, with the text's next token in place of the drawn one and every logit as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.engine.slot_pool import Lease

Progress = Callable[[int, int], None]
_BLOCK = 256  # rows of logits that are in float64 at a time


class ForcedDecoder:
    """Feeds one slot of an engine a text, token by token, through decode steps. Works with the engine's own state: a
    second one would not fit on a card. The engine must be idle meanwhile."""

    def __init__(self, engine: Engine):
        """Compiles one program, the step, unless an earlier decoder of this engine has."""
        self.engine = engine
        engine.programs.compiled("step")

    @contextmanager
    def sequence(self, tokens: int) -> Iterator[ForcedSequence]:
        """An empty sequence with room for `tokens` tokens; its slot and pages are free again afterwards."""
        with self.engine.runner.lease(tokens) as lease:
            yield ForcedSequence(self, lease)


class ForcedSequence:
    """A slot that a text is fed to."""

    def __init__(self, decoder: ForcedDecoder, lease: Lease):
        self._decoder, self._lease = decoder, lease

    def prefill(self, tokens: SequenceOf[int], progress: Progress | None = None) -> np.ndarray:
        """Append `tokens` through the prefill program; the last one's logits, float32 `[vocab rows]`. Before any step."""
        last, end = None, self._lease.length + len(tokens)
        for chunk in self._lease.prefill(tokens):
            last = chunk
            if progress:
                progress(self._lease.length, end)
        if last is None:
            raise ValueError("prefill: no tokens")
        count, hidden = last
        return self._lease.logits(hidden)[count - 1]

    def step(self, token: int) -> np.ndarray:
        """Append `token` through one decode step; its logits, float32 `[vocab rows]`."""
        return self._lease.step(token)

    def recurrent(self) -> list[np.ndarray]:
        """The recurrent states as they stand, float32 `[value_heads, key_dim, value_dim]`, one a GDN layer."""
        runner = self._decoder.engine.runner
        runner.settle()
        return [np.asarray(layer[self._lease.slot]) for layer in runner.state.recurrent]


def log_softmax(logits: np.ndarray, valid: int) -> np.ndarray:
    """Natural log-probabilities of the first `valid` ids, float32 `[rows, valid]`, computed in float64 from logits
    `[rows, vocab rows]`: rows of padding beyond the tokenizer's ids are no tokens."""
    out = np.empty((len(logits), valid), np.float32)
    for start in range(0, len(logits), _BLOCK):
        x = logits[start : start + _BLOCK, :valid].astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        out[start : start + _BLOCK] = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return out
