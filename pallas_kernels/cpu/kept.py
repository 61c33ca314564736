"""Machine code kept between runs: `$XDG_CACHE_HOME/ninfer_jax/cpu`, one file a module, under the digest of all that made it."""

from __future__ import annotations

from pallas_kernels.kept_files import KeptFiles

MOST_BYTES = 64 * 2**20  # a 27B engine's kernels are 1 MB; the rest is for other shapes and for who works on kernels
FILES = KeptFiles("cpu", ".o", "CPU kernel", lambda: MOST_BYTES)
read, write = FILES.read, FILES.write
