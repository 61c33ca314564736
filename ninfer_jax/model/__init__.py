"""The hybrid model as Flax modules: exact steps of the architecture, no state and no decoding policy.

Conventions, each checked against the reference model in tests: norms are zero-centred (1 + w) except the one inside
the delta rule; q_proj is `[query | gate]` per head and the gate is a sigmoid; RoPE turns the leading quarter of a head
in rotate-half pairs; the convolution's last tap is the current token; decay comes before the delta-rule read-out.
"""

from ninfer_jax.model.parameters import (
    ParameterSpec,
    checkpoint_tensors,
    fill,
    fill_arrays,
    join_and_put,
    parameter_specs,
    parameters_of,
    split_model,
)
from ninfer_jax.model.text import DecoderLayer, MTPHead, TextModel

__all__ = [
    "DecoderLayer",
    "MTPHead",
    "ParameterSpec",
    "TextModel",
    "checkpoint_tensors",
    "fill",
    "fill_arrays",
    "join_and_put",
    "parameter_specs",
    "parameters_of",
    "split_model",
]
