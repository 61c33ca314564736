"""The prefix cache: what was prefilled once, kept as bytes in host memory and on disk. Knows no device."""

from ninfer_jax.cache.cache import Hit, Image, PrefixCache
from ninfer_jax.cache.container import Identity
from ninfer_jax.cache.counters import Counters
from ninfer_jax.cache.policy import END, SYSTEM, TURN, USER, Mark, planned
from ninfer_jax.cache.tree import Media

__all__ = ["END", "SYSTEM", "TURN", "USER", "Counters", "Hit", "Identity", "Image", "Mark", "Media", "PrefixCache", "planned"]
