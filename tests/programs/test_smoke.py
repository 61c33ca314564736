"""The whole path on the bundled model, small enough for every version lane: load, prefill, draft, verify."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax import ModelConfig, SamplingParams
from ninfer_jax.checkpoints import Checkpoint, load_parameters, tiny_path
from ninfer_jax.model import TextModel, fill, parameter_specs, split_model
from ninfer_jax.model.sequence import forward_sequences

PROMPT = "HAMLET.\nGood night, sweet "
NEW = 40
LENGTH = 64  # whole sequences come in multiples of 64; what is past the tokens cannot reach back


def test_drafted_greedy_tokens_are_those_of_a_pass_over_the_whole_sequence(draft_engine):
    """Against the path without cache, state and programs, which training uses."""
    prompt = draft_engine.tokenizer.encode(PROMPT)
    given = draft_engine.generate(prompt, SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True))
    tokens = prompt + list(given.tokens)
    assert len(tokens) <= LENGTH and given.stats.drafted > 0

    model = TextModel(ModelConfig.from_hf(tiny_path()), jnp.float32, mtp=True)
    arrays = load_parameters(Checkpoint.open(tiny_path()), parameter_specs(model), device_put=jax.device_put)
    graph, described = split_model(model)
    model = nnx.merge(graph, fill(described, arrays))
    hidden = forward_sequences(model, jnp.array([tokens + [0] * (LENGTH - len(tokens))], jnp.int32))[0]
    logits = np.array(model.logits(hidden))[:, : draft_engine.tokenizer.vocab_size]
    assert logits[len(prompt) - 1 : len(tokens) - 1].argmax(axis=1).tolist() == tokens[len(prompt) :]
