"""Speeds that others measured on an RTX 4090 with the same 27B, as they published them: C++ forks of NInfer and llama.cpp.

Sources: README and llamacpp-comparison of the fork for this card (rk4v4-e8, 262,144 tokens, chunk 1,024, drafts by the MTP
head with a reduced draft head, 450 W, August 2026; llama.cpp b10358, UD-Q4_K_XL, q8_0 pages); the notes of two forks on
prefill with 8-bit activations.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """tok_s at `depth` tokens in the context; share: of the K = 3 drafts that were accepted, None without drafts."""

    what: str
    depth: int
    share: float | None
    tok_s: float


FORK, INT8, LLAMA = "NInfer's fork", "a fork, 8-bit activations", "llama.cpp"
DECODE = (
    Published(f"{FORK}, plain", 2_048, None, 50.4),
    Published(f"{FORK}, plain", 117_791, None, 42.1),
    Published(f"{FORK}, plain", 235_399, None, 36.6),
    Published(f"{LLAMA}, plain", 32_768, None, 42.0),
    Published(f"{LLAMA}, plain", 131_072, None, 33.1),
    Published(f"{FORK}, code, K = 3", 2_048, 0.780, 142.9),
    Published(f"{FORK}, code, K = 3", 58_924, 0.806, 129.0),
    Published(f"{FORK}, code, K = 3", 117_791, 0.778, 114.2),
    Published(f"{FORK}, code, K = 3", 235_399, 0.721, 91.2),
    Published(f"{FORK}, prose, K = 3", 29_479, 0.439, 94.6),
    Published(f"{FORK}, prose, K = 3", 117_791, 0.416, 77.5),
    Published(f"{FORK}, prose, K = 3", 235_399, 0.411, 65.4),
)
PREFILL = (
    Published(FORK, 29_479, None, 2_027),
    Published(FORK, 117_791, None, 1_581),
    Published(FORK, 235_399, None, 1_228),
    Published(INT8, 6_144, None, 3_622),
    Published(INT8, 25_600, None, 3_389),
    Published(INT8, 115_125, None, 2_496),
)
