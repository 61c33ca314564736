"""Environments of the commands that tests run as processes of their own."""

from __future__ import annotations

import os

_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
# On the CPU, compiled in half the time: for commands whose numbers nobody compares bit by bit with this process's.
FUNCTIONAL = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _FLAGS}
