"""Gated DeltaNet: convolution, gates and the delta rule, for decode rows (recurrent) and prefill chunks (WY form)."""

from pallas_kernels.delta_rule.chunked import CHUNK, chunked_delta_rule
from pallas_kernels.delta_rule.inputs import causal_conv, decay_and_beta, l2_normalise, split_qkv
from pallas_kernels.delta_rule.records import Layout, ring_rows
from pallas_kernels.delta_rule.recurrent import Transitions, decode_delta_rule, fold_transitions

__all__ = [
    "CHUNK",
    "Layout",
    "Transitions",
    "causal_conv",
    "chunked_delta_rule",
    "decay_and_beta",
    "decode_delta_rule",
    "fold_transitions",
    "l2_normalise",
    "ring_rows",
    "split_qkv",
]
