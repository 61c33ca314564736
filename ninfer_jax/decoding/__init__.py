"""Decoding policy: sampling parameters, the draw, and the acceptance of drafts."""

from ninfer_jax.decoding.masks import masked
from ninfer_jax.decoding.params import SamplingParams
from ninfer_jax.decoding.sampling import (
    Choice,
    SamplingState,
    choose,
    choose_among,
    choose_what_is_asked,
    most_likely,
    needs_all_logits,
)
from ninfer_jax.decoding.verify import Verdict, judge

__all__ = [
    "Choice",
    "SamplingParams",
    "SamplingState",
    "Verdict",
    "choose",
    "choose_among",
    "choose_what_is_asked",
    "judge",
    "masked",
    "most_likely",
    "needs_all_logits",
]
