"""Decoding policy: sampling parameters, the draw, and the acceptance of drafts."""

from ninfer_jax.decoding.params import SamplingParams
from ninfer_jax.decoding.sampling import Choice, SamplingState, choose, most_likely
from ninfer_jax.decoding.verify import Verdict, judge

__all__ = ["Choice", "SamplingParams", "SamplingState", "Verdict", "choose", "judge", "most_likely"]
