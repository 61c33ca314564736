"""The sums of a draw for the lab: four rows over the 27B's vocabulary, and over the candidates that are sorted."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.draw import cpu, reference
from pallas_kernels.lab.on_cpu import CpuCase

SLOTS, ROWS, CANDIDATES, VOCABULARY = 1, 4, 1024, 248320


def _sorted(key: jax.Array) -> list[jax.Array]:
    """Falling logits from 0 on, and settings that cut."""
    values = -jnp.sort(jnp.abs(3 * jax.random.normal(key, (SLOTS, ROWS, CANDIDATES))))
    settings = [jnp.full((SLOTS,), x, t) for x, t in ((40, jnp.int32), (0.95, jnp.float32), (0.01, jnp.float32))]
    return [values - values[..., :1], *settings, jax.random.uniform(key, (SLOTS, ROWS))]


_struct = jax.ShapeDtypeStruct
ON_CPU = (
    CpuCase("log_total", "cpu.4rows", cpu.log_total, reference.log_total, (_struct((ROWS, VOCABULARY), jnp.float32),)),
    CpuCase(
        "draw_sorted",
        "cpu.4rows",
        cpu.draw_sorted,
        reference.draw_sorted,
        (
            _struct((SLOTS, ROWS, CANDIDATES), jnp.float32),
            *(_struct((SLOTS,), t) for t in (jnp.int32, jnp.float32, jnp.float32)),
            _struct((SLOTS, ROWS), jnp.float32),
        ),
        draw=_sorted,
    ),
)
