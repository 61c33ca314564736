"""The share of a GPU that JAX takes when it starts: what the engine's plan adds up to, as one block.

JAX's own choice, three quarters, is less than the 27B with its full context needs, and its other choice, to grow by what is
asked for, leaves room for surprises in service. It reads its limits from the environment when the first computation
starts the device, so the plan has to be made from shapes alone, before that, and the card asked through the driver.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeVar

import jax

from ninfer_jax.planning.budget import OUTSIDE
from ninfer_jax.programs.plan import WORKSPACE_ALLOWANCE, resident_bytes
from ninfer_jax.programs.setup import Setup
from pallas_kernels.driver import card_memory

Chosen = TypeVar("Chosen")
FRACTION, PREALLOCATE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
# Whoever sets one of these has chosen; the first is an older name of FRACTION, and JAX refuses both at once.
CHOSEN = ("XLA_PYTHON_CLIENT_MEM_FRACTION", FRACTION, PREALLOCATE, "XLA_PYTHON_CLIENT_ALLOCATOR")


def share(setup: Setup) -> int:
    """Bytes that an engine may ask JAX for: weights, pages and states, the logits of one scored chunk, and the allowance for
    temporaries, loading's too. From shapes alone: no device is started."""
    return resident_bytes(setup.programs()) + 4 * setup.chunk * setup.model.vocab_size + WORKSPACE_ALLOWANCE


def settings(need: int | None, free: int, total: int) -> dict[str, str]:
    """The environment by which JAX takes `need` bytes of a card at once, or what is free where that is less or `need` is
    None. A need that is not there is for `check_memory` to refuse, which knows it to the byte.

    JAX takes floor(fraction x total), hence the fraction is rounded up, to millionths; what is free is rounded down.
    """
    most = math.floor((free - OUTSIDE) / total * 1e6)
    wanted = most if need is None else math.ceil(need / total * 1e6)
    return {FRACTION: f"{max(0, min(wanted, most)) / 1e6:.6f}", PREALLOCATE: "true"}


def reserve(plan: Callable[[int], Setup] | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have JAX take the share of the planned engine, or for None all that is free (for several engines, one after another).
    plan: called with the bytes that an engine may take.

    Comes before JAX's first computation; later it changes nothing, and `check_memory` says so if the engine does not fit.
    Nothing happens where there is no NVIDIA driver, where JAX is told to leave GPUs alone, or where the environment says
    already how much to take.
    """
    if any(name in environment for name in CHOSEN) or not gpu_wanted(environment):
        return
    card = card_memory()
    if card is not None:
        environment.update(settings(None if plan is None else share(plan(max(0, card[0] - OUTSIDE))), *card))


def reserve_for(choose: Callable[[int], Chosen], setup: Callable[[Chosen], Setup]) -> Chosen | None:
    """The choice for a card, by what its driver says is free, and JAX told to take its share; None where JAX decides for itself."""
    made: list[Chosen] = []

    def plan(free: int) -> Setup:
        made.append(choose(free))
        return setup(made[0])

    reserve(plan)
    return made[0] if made else None


def limit_hint(need: int, limit: int) -> str:
    """Advice where JAX's limit, and not the card, is too small for `need` bytes; "" where the card is too small."""
    card = card_memory()
    if card is None or need > limit + card[0]:
        return ""
    fraction = math.ceil(need / card[1] * 100) / 100
    return (
        f"JAX was started with a limit of {limit:,} bytes: load the engine before anything else uses JAX, "
        f"or set {FRACTION}={fraction:.2f}"
    )


def gpu_wanted(environment: Mapping[str, str]) -> bool:
    """Whether JAX may take a GPU, by what it is told."""
    platforms = jax.config.values["jax_platforms"] or environment.get("JAX_PLATFORMS") or "cuda"
    return not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
