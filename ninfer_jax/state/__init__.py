"""The engine's mutable state: page pools, recurrent states, slots; and the host's page allocator."""

from ninfer_jax.state.layout import Slots, State, StateShape, allocate_state, state_shape, state_struct
from ninfer_jax.state.pages import PageAllocator

__all__ = ["PageAllocator", "Slots", "State", "StateShape", "allocate_state", "state_shape", "state_struct"]
