"""Rounds under a test's control: the drafts are written in before each round, the state can be read after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ninfer_jax import Engine, SamplingParams
from ninfer_jax.config import PAGE
from ninfer_jax.engine.runner import Runner
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.state import State

Script = Callable[[list[int]], list[int]]

PROMPTS = (
    "HAMLET.\nTo be, or not to be",
    "ROMEO.\n",
    "KING HENRY.\nOnce more unto the breach",
    "ACT I. SCENE I.\n",
    "def read(self, size=-1):\n",
    "class Queue:\n",
    "import os\nimport sys\n",
    "    def __init__(self",
    "Enter two Gentlemen.",
    "MACBETH.\nIs this a dagger",
    "for line in file:\n",
    "return ",
    "FIRST WITCH.\nWhen shall we three",
    "PROSPERO.\nOur revels now are ended",
    "try:\n    ",
    "The quality of mercy",
    "raise ValueError(",
    "OTHELLO.\n",
    "<|im_start|>user\nWho are you?<|im_end|>\n",
    "1, 2, 3, 4, 5, 6,",
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=256, ignore_eos=True)


def config(draft: int, kv: str, slots: int = 1) -> dict[str, Any]:
    """Fields of EngineConfig: what the standard engines have, and these."""
    return dict(context=512, prefill_chunk=64, kv=kv, draft=draft, slots=slots)


class ScriptedRunner(Runner):
    """A runner over an engine's programs and parameters with a state of its own, which every round leaves to be looked at."""

    look_ahead = False

    def __init__(self, engine: Engine):
        super().__init__(engine.programs, engine.runner.pool.parameters, engine.programs.allocate())

    def write_drafts(self, slot: int, drafts: list[int]) -> None:
        def write(parameters: list[jax.Array], state: State) -> tuple[State, None]:
            slots = state.slots
            return state._replace(slots=slots._replace(drafts=slots.drafts.at[slot].set(np.array(drafts, np.int32)))), None

        with self.pool.transaction():
            self.pool.run(write)

    def snapshot(self, slot: int, table: np.ndarray) -> dict[str, np.ndarray]:
        """Everything that later rounds depend on: length, recurrent and conv states, and the filled part of the pages."""
        self.settle()
        state, window = self.state, self.pool.programs.config.conv_width - 1
        length = int(state.slots.length[slot])
        arrays = {"length": np.array(length)}
        for layer, (recurrent, conv) in enumerate(zip(state.recurrent, state.conv, strict=True)):
            arrays[f"recurrent{layer}"] = np.asarray(recurrent)[slot].copy()
            arrays[f"conv{layer}"] = np.asarray(conv)[slot, :window].copy()
        # With NumPy: each length is a shape of its own, for which JAX would compile.
        token = np.arange(length)
        for layer, pool in enumerate(state.kv):
            for at, leaf in enumerate(jax.tree.leaves(pool)):
                arrays[f"pages{layer}.{at}"] = np.asarray(leaf)[table[token // PAGE], :, token % PAGE]
        return arrays


def run(
    engine: Engine, prompt: list[int], params: SamplingParams, script: Script | None = None, budget: int | None = None
) -> tuple[Sequence, dict[int, dict[str, np.ndarray]]]:
    """One completion, with a snapshot after every round under the number of tokens emitted by then.

    script: given the tokens so far, the drafts of the next round; None leaves the MTP head's own.
    """
    runner = ScriptedRunner(engine)
    room = engine.context - len(prompt)
    ends = (() if params.ignore_eos else engine.defaults.eos_ids) + params.stop_ids
    allowed = min(budget or params.max_new_tokens or room, room)
    sequence = Sequence(prompt, params, allowed, params.seed or 0, ends, engine.tokenizer)
    runner.submit(sequence)
    # In the two steps of `advance`, to look at the state after each.
    runner.prefill()
    table = sequence.lease.table
    snapshots = {1: runner.snapshot(0, table)}
    while not sequence.finished:
        if script is not None:
            runner.write_drafts(0, script(sequence.tokens))
        runner.round()
        snapshots[len(sequence.tokens)] = runner.snapshot(0, table)
    return sequence, snapshots


def compare_greedy(plain: Engine, drafting: Engine) -> None:
    """Eight answers of 64 tokens are the same; rounds with every number of accepted drafts must have occurred."""
    params, accepted = replace(GREEDY, max_new_tokens=64), set()
    for prompt in PROMPTS[:8]:
        _, *rounds, last = drafting.stream(prompt, params)
        assert last.completion.tokens == plain.generate(prompt, params).tokens
        accepted |= {len(piece.tokens) - 1 for piece in rounds if piece.tokens}
    assert accepted == set(range(drafting.programs.shape.draft + 1))
