"""Block sizes chosen for a card, where the defaults in the code are not the best: `<card>.json`, written by the lab's `tune`.

A file maps op -> shape key -> {"config": the kernel's Config fields, "by": "measured" on that card or "compiled" (ranked
by compiled figures, no card used), "jax": version, "date": day}. Cards, ops and shapes that are not there get the
defaults. No block size changes a kernel's result, only its time.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import targets

FOLDER = Path(__file__).parent
BY = ("measured", "compiled")

# `with card("rtx4090"):` what is traced in here will run on that card. Part of the key of JAX's caches of traces, so that
# a program for one card never gets the block sizes of another.
card = jax.make_user_context(None)


def lookup(op: str, key: str) -> dict[str, Any] | None:
    """The Config fields tuned for `op` at shape `key` on the card being compiled for; None: use the defaults."""
    name = card.value or _present()
    entry = entries(name).get(op, {}).get(key) if name else None
    return dict(entry["config"]) if entry else None


@functools.cache
def entries(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Tuned entries of a card: op -> key -> entry; empty for a card without a file. Read once in a process."""
    path = FOLDER / f"{name}.json"
    return read(path) if path.is_file() else {}


def sizes(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """op -> key -> the Config fields tuned for a card: what decides about a program, without how and when they were chosen."""
    return {op: {key: entry["config"] for key, entry in keys.items()} for op, keys in entries(name).items()}


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """A file of tuned sizes. ValueError where it is none."""
    try:
        found = json.loads(path.read_text())
        if all(e["by"] in BY and isinstance(e["config"], dict) for keys in found.values() for e in keys.values()):
            return found
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ValueError(f"{path}: not a file of tuned block sizes; `python -m pallas_kernels.lab tune` writes one")


@functools.cache
def _present() -> str | None:
    """The card in this machine, if it is one of `targets`."""
    return targets.of_device(jax.devices()[0].device_kind) if jax.default_backend() == "gpu" else None
