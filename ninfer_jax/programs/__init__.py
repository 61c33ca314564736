"""Jitted entry points over (parameters, state): what runs on the device, and nothing of what decides on the host."""

from ninfer_jax.programs.compilations import compilations
from ninfer_jax.programs.decode import RoundOutput
from ninfer_jax.programs.prefill import PrefillInputs
from ninfer_jax.programs.programs import Programs
from ninfer_jax.programs.slots import admission
from ninfer_jax.programs.snapshots import Snapshot

__all__ = ["PrefillInputs", "Programs", "RoundOutput", "Snapshot", "admission", "compilations"]
