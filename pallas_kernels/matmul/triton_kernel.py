"""The decode projection once more, through Triton's own compiler (`jax_triton`): the way on from Pallas' GPU backend.

Same storage, plan and default block sizes as `kernel.decode`; the one difference is the norm's sum of squares, which here
comes from tensor cores while the blocks of x are at hand. Compiled for cards and run in Triton's interpreter on a CPU,
never run on a card. Triton and jax-triton come with the extra `triton` and are imported at the first call.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import targets, tuned
from pallas_kernels.matmul import kernel, unpack
from pallas_kernels.matmul.quantised import COLUMNS, QuantisedWeight

ROWS = kernel.ROWS
Config = kernel.Config
_NEEDS = "needs jax-triton and Python 3.12 or newer; install the extra: pip install 'ninfer-jax[triton]'"


def require() -> tuple[ModuleType, ModuleType]:
    """The modules `jax_triton` and `triton_body`. RuntimeError naming the extra where one is not installed."""
    try:
        return importlib.import_module("jax_triton"), importlib.import_module("pallas_kernels.matmul.triton_body")
    except ModuleNotFoundError as e:
        raise RuntimeError(f"impl 'triton' {_NEEDS}") from e


def decode(
    x: jax.Array,
    weight: QuantisedWeight,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    swiglu: bool = False,
    out_dtype: Any = jnp.bfloat16,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`kernel.decode` through Triton's own compiler; x `[1..16, K]` bf16. `interpret`: its interpreter, on arrays and not
    under `jit`.

    RuntimeError where jax-triton is not installed, ValueError for more rows or a config that does not fit.
    """
    if x.shape[0] > ROWS:
        raise ValueError(f"impl: 'triton' is for up to {ROWS} rows, x has {x.shape[0]}")
    _, body = require()
    columns = weight.shape[1] // 2 if swiglu else weight.shape[1]
    config = config or kernel.default_config(columns, weight.group, swiglu)
    if COLUMNS % config.columns:
        raise ValueError(f"decode: {config.columns} columns a block must divide {COLUMNS}, the padding of weights")
    options: dict[str, Any] = dict(eps=eps, swiglu=swiglu, out_dtype=jnp.dtype(out_dtype), config=config)
    if not interpret:
        return _launch(x, weight, norm, residual, **options)
    from pallas_kernels.matmul import triton_interpreter

    out, constants = _shapes(x, weight, **options)
    planes = range(16 // weight.bits)
    twins = dict([*(unpack.to_bf16(weight.bits, j) for j in planes), *map(unpack.to_scale, planes)])
    return triton_interpreter.run(
        body.decode,
        [x, weight.words, weight.scales, weight.unit, norm, residual],
        out,
        grid=(-(-out.shape[1] // config.columns),),
        constants=constants,
        twins=twins | {unpack.ONE_PLUS: unpack.one_plus},
    )


def _shapes(
    x: jax.Array, weight: QuantisedWeight, eps: float, swiglu: bool, out_dtype: Any, config: Config
) -> tuple[jax.ShapeDtypeStruct, dict[str, Any]]:
    """The output, and the constants of the body."""
    (rows, k), n = x.shape, weight.shape[1] // 2 if swiglu else weight.shape[1]
    planes = 16 // weight.bits
    return jax.ShapeDtypeStruct((rows, n), out_dtype), dict(
        ROWS=rows,
        K=k,
        N=n,
        PADDED=weight.padded_columns,
        GROUP=weight.group,
        PLANES=planes,
        TILES=weight.tiles,
        COLUMNS=config.columns,
        SWIGLU=swiglu,
        EPS=eps,
        UNPACK=tuple(unpack.to_bf16(weight.bits, j)[0] for j in range(planes)),
        ONE_PLUS=unpack.ONE_PLUS,
        SCALE=tuple(unpack.to_scale(j)[0] for j in range(planes)),
    )


@functools.partial(jax.jit, static_argnames=("eps", "swiglu", "out_dtype", "config"))
def _launch(
    x: jax.Array,
    weight: QuantisedWeight,
    norm: jax.Array | None,
    residual: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
    out_dtype: Any,
    config: Config,
) -> jax.Array:
    jax_triton, body = require()
    out, constants = _shapes(x, weight, eps, swiglu, out_dtype, config)
    # PTX 8.7 is what CUDA 12.8 reads: Triton writes for its own, newer assembler, but JAX's turns it into machine code.
    # Triton's next version no longer fuses multiplications and additions unasked.
    options = {"ptx_version": 87, "enable_fp_fusion": True}
    if config.warps == 8 and weight.tile >= 256:
        options["maxnreg"] = 128  # two blocks an SM, a few registers short of which the compiler would stop
    return jax_triton.triton_call(
        x,
        weight.words,
        weight.scales,
        weight.unit,
        norm,
        residual,
        kernel=body.decode,
        out_type=out,
        grid=(-(-out.shape[1] // config.columns),),
        name=f"w{weight.bits}_triton" + "_norm" * (norm is not None) + "_swiglu" * swiglu + "_add" * (residual is not None),
        num_warps=config.warps,
        num_stages=config.stages,
        compute_capability=_compute_capability(),
        backend_options=options,
        **constants,
    )


def _compute_capability() -> int | None:
    """Compute capability, as 89 for an RTX 4090, of the card that is being compiled for; None: that of this machine's card."""
    if tuned.card.value is None:
        return None
    major, minor = targets.get(tuned.card.value).compute_capability
    return 10 * major + minor
