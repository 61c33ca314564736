"""A kernel of one's own, from nothing to its machine code: the squared length of each row of a matrix.

python examples/own_kernel.py
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import inspect, launch

WIDTH = 256  # columns a step; everything a kernel holds has a power-of-two size


@functools.partial(jax.jit, static_argnames="interpret")
def squared_lengths(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """x `[rows, columns]` -> float32 `[rows]`, one block a row."""
    rows, columns = x.shape

    def kernel(x_ref, o_ref):
        row = pl.program_id(0)

        def step(i, total):
            inside = i * WIDTH + jnp.arange(WIDTH) < columns  # the last step overhangs
            values = launch.load(x_ref, (row, pl.ds(i * WIDTH, WIDTH)), inside).astype(jnp.float32)
            return total + values * values

        total = jax.lax.fori_loop(0, -(-columns // WIDTH), step, jnp.zeros(WIDTH, jnp.float32))
        o_ref[row] = jnp.sum(total)

    out = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return launch.launch(
        kernel,
        name="squared_lengths",
        grid=(rows,),
        in_specs=[launch.whole(x)],
        out_specs=launch.whole(out),
        out_shape=out,
        num_warps=1,
        num_stages=2,
        interpret=interpret,
    )(x)


def main() -> None:
    # Numbers first: interpreted, on any machine, at a size that is no multiple of a step.
    x = np.random.default_rng(0).normal(size=(5, 700)).astype(np.float32)
    error = np.abs(squared_lengths(jnp.asarray(x), interpret=True) / (x.astype(np.float64) ** 2).sum(1) - 1).max()
    print(f"largest relative error {error:.1e}")

    # Then the real shape, compiled for a card that need not be here.
    shape = jax.ShapeDtypeStruct((1024, 5120), jnp.bfloat16)
    try:
        report = inspect.report(squared_lengths, [shape], "rtx4090")
    except RuntimeError as error:
        sys.exit(f"not compiled: {error}")
    kernel = report.kernels["squared_lengths"]
    print(f"{kernel.registers} registers, {kernel.spill_bytes} bytes spilled, {kernel.smem_bytes} of shared memory")
    print(f"{kernel.blocks_per_sm(report.target)} blocks on an SM, occupancy {kernel.occupancy(report.target):.0%}")
    print("loads:", {op: n for op, n in kernel.ops.items() if op.startswith("LDG")})
    # The compiler may unroll, so passes are counted by loads: a warp needs 5120 x 2 bytes in loads of 32 x 16 bytes.
    (loop,) = kernel.loops
    passes = [(5120 * 2 / 512 - inspect.count(kernel.straight, "LDG")) / inspect.count(loop.ops, "LDG")]
    instructions = kernel.executed(trips=passes) * kernel.threads * kernel.blocks
    print(f"{instructions / (1024 * 5120 * 2):.1f} thread instructions a byte; about 41 fit into the time of reading it")


if __name__ == "__main__":
    main()
