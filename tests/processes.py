"""Environments of the commands that tests run as processes of their own."""

from __future__ import annotations

import os

# On the CPU, compiled in half the time: for commands whose numbers nobody compares bit by bit.
FUNCTIONAL = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
