"""Teacher-forced decode steps with all logits.

A decode round gives out at most the 20 most likely tokens, because nobody who generates needs more. Here the same
functions that a round is made of are compiled with the text's next token in place of the drawn one and
with every logit as the result. A row's bits do not depend on the rows beside it, so they are those of decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.engine.slot_pool import Lease
from ninfer_jax.model import TextModel
from ninfer_jax.programs import Programs
from ninfer_jax.programs.pending import accept
from ninfer_jax.programs.verify import verify_rows
from ninfer_jax.state import State

Progress = Callable[[int, int], None]
_BLOCK = 256  # rows of logits that are in float64 at a time
_steps: WeakKeyDictionary[Programs, Callable[..., tuple[State, jax.Array]]] = WeakKeyDictionary()


class ForcedDecoder:
    """Feeds one slot of an engine a text, token by token, through decode steps. Works with the engine's own state: a
    second one would not fit on a card. The engine must be idle meanwhile."""

    def __init__(self, engine: Engine):
        """Compiles one program, the step, unless an earlier decoder of this engine has."""
        self.engine = engine
        if engine.programs not in _steps:
            _steps[engine.programs] = _compile_step(engine.programs)
        self.step = _steps[engine.programs]

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
        return np.asarray(self._lease.run(lambda *given: self._decoder.step(*given, np.int32(token)), appended=1))

    def recurrent(self) -> list[np.ndarray]:
        """The recurrent states as they stand, float32 `[value_heads, key_dim, value_dim]`, one a GDN layer."""
        runner = self._decoder.engine.runner
        runner.settle()
        return [np.asarray(layer[self._lease.slot]) for layer in runner.state.recurrent]


def _compile_step(programs: Programs) -> Callable[..., tuple[State, jax.Array]]:
    build, kv = programs.build, programs.shape.kv
    _, (parameters, state), _ = programs.source("decode_round")

    def step(parameters: SequenceOf[jax.Array], state: State, slot: jax.Array, token: jax.Array) -> tuple[State, jax.Array]:
        return forced_step(build(parameters), state, slot, token, kv)

    integer = jax.ShapeDtypeStruct((), jnp.int32)
    return programs.compile_as(step, (parameters, state, integer, integer), donated=(1,))


def forced_step(model: TextModel, state: State, slot: jax.Array, token: jax.Array, kv: str) -> tuple[State, jax.Array]:
    """One row of one slot through the layers and into its states, as `decode_round` does it; the state, and float32
    logits `[vocab rows]`. slot, token: int32 scalars. Nothing is drawn or drafted, and the other slots stay as they are."""
    slots = state.slots
    mine = jnp.arange(slots.length.shape[0]) == slot
    rows = jnp.where(mine, token, 0)[:, None]
    here = state._replace(slots=slots._replace(active=mine))
    emitted = mine.astype(jnp.int32)
    hidden, here = verify_rows(model, here, rows, kv)
    logits = model.logits(hidden[:, 0])
    after = accept(here, mine, emitted)
    return after._replace(slots=slots._replace(length=slots.length + emitted)), logits[slot]


def log_softmax(logits: np.ndarray, valid: int) -> np.ndarray:
    """Natural log-probabilities of the first `valid` ids, float32 `[rows, valid]`, computed in float64 from logits
    `[rows, vocab rows]`: rows of padding beyond the tokenizer's ids are no tokens."""
    out = np.empty((len(logits), valid), np.float32)
    for start in range(0, len(logits), _BLOCK):
        x = logits[start : start + _BLOCK, :valid].astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        out[start : start + _BLOCK] = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return out
