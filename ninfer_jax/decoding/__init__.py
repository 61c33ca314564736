"""Decoding policy: sampling parameters, the draw, and the acceptance of drafts."""

from ninfer_jax.decoding.grammar import Grammar
from ninfer_jax.decoding.masks import Masks, masked, masks_struct
from ninfer_jax.decoding.params import SamplingParams
from ninfer_jax.decoding.sampling import (
    Choice,
    SamplingState,
    all_logits_needed,
    choose,
    choose_among,
    choose_what_is_asked,
    most_likely,
    needs_all_logits,
)
from ninfer_jax.decoding.verify import Verdict, judge

__all__ = [
    "Choice",
    "Grammar",
    "Masks",
    "SamplingParams",
    "SamplingState",
    "Verdict",
    "all_logits_needed",
    "choose",
    "choose_among",
    "choose_what_is_asked",
    "judge",
    "masked",
    "masks_struct",
    "most_likely",
    "needs_all_logits",
]
