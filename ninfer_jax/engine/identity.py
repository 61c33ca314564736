"""The identity of kept bytes: weights, formats, code, and in exact mode all that bits hang on."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

import jax

from ninfer_jax.programs import Programs
from ninfer_jax.programs.provenance import instructions, made_of, running_cuda
from ninfer_jax.programs.setup import Setup
from pallas_kernels import targets

# Fields of a configuration that decide what the numbers in a page and a state are; of the others only their last bits.
_MEANING = ("kv", "dtype", "model", "weights", "token_ids")


class Digested(Protocol):
    """Weights that have a digest."""

    def digest(self) -> str: ...


def identity_of(setup: Setup, programs: Programs, weights: Digested, mode: str) -> dict[str, str | int]:
    """The identity field by field, those first that a message should name. mode: "exact" or "fast"; what was kept in one is not
    used in the other. Reads the files of a checkpoint whole, for their digest."""
    digest = weights.digest()
    device: Any = jax.devices()[0]
    cpu = device.platform == "cpu"
    target = "cpu" if cpu else targets.of_device(device.device_kind) or device.device_kind
    known = cpu or target in targets.names()
    made = made_of(target, 0 if cpu else running_cuda(device), setup.kernels) if known else made_of("cpu")
    configuration = setup.configuration(programs)
    found: dict[str, Any] = {"weights": digest, "mode": mode, "kv": configuration["kv"], "dtype": configuration["dtype"]}
    found |= {"mtp": int(setup.shape.mtp), "code": made["code"]}
    if mode == "exact":
        found |= configuration | made | {"weights": digest, "formats": configuration["weights"], "device": target}
        found |= {"instructions": instructions()} if cpu else {}
    else:
        found |= {name: configuration[name] for name in _MEANING if name not in found}
        found["formats"] = configuration["weights"]
    return {field: value if isinstance(value, str | int) else _digest(value) for field, value in found.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
