"""The compiler without a card, in processes of their own: before JAX has started, after it, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
import os
import jax
STARTED
from pallas_kernels import deviceless
before = dict(os.environ)
deviceless.start("rtx4090")
assert dict(os.environ) == before and "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in before
compiled = deviceless.compile_for(lambda x: x @ x + 1, [jax.ShapeDtypeStruct((64, 64), "float32")], "rtx4090")
print(compiled.memory_analysis().argument_size_in_bytes, jax.devices()[0].platform, float(jax.numpy.ones(3).sum()))
"""


@pytest.mark.parametrize("started", ["", "jax.devices()"])
def test_the_compiler_starts_before_jax_and_after_it(started: str) -> None:
    """Without a word about the driver that is not there, if it comes first; later JAX has had its say already."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("STARTED", started)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(4 * 64 * 64), "cpu", "3.0"]
    assert started or done.stderr == ""
