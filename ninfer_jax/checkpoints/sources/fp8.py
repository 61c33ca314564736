"""Block-scaled FP8: e4m3 weights and, in `NAME_scale_inv`, what each block of 128 x 128 is to be multiplied with.

The scales are floats, or exponents (ue8m0): float8_e8m0fnu, or their bytes as uint8 where `scale_fmt` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.grid import FLOATS, Grid, blocks_of
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import SourceTensor

SUFFIX = "_scale_inv"


def fp8_tensors(infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any]) -> dict[str, SourceTensor]:
    """CheckpointError for FP8 of another kind: e5m2, or one scale a tensor or a channel."""
    weights = {n: i for n, i in infos.items() if i.dtype.startswith("F8") and not n.endswith(SUFFIX)}
    first = next(iter(weights), None)
    given = quantization.get("weight_block_size")
    whole = isinstance(given, list) and len(given) == 2 and all(type(b) is int and b > 0 for b in given)
    if first is not None and not whole:
        raise CheckpointError(f"{first}: FP8 without weight_block_size (one scale a tensor or channel) is not supported")
    block = (given[0], given[1]) if isinstance(given, list) and whole else (1, 1)  # of no use without such weights
    named = quantization.get("scale_fmt")
    if named not in (None, "ue8m0", "float32"):
        raise CheckpointError(f"{first}: FP8 with scale_fmt {named} is not supported, ue8m0 and float32 are")
    dtypes = (*FLOATS, "F8_E8M0", *(("U8",) if named == "ue8m0" else ()))
    found: dict[str, SourceTensor] = {}
    rest = dict(infos)
    for name, info in weights.items():
        scale = rest.pop(name + SUFFIX, None)
        if info.dtype != "F8_E4M3" or len(info.shape) != 2:
            raise CheckpointError(
                f"{name} in {info.file}: FP8 of type {info.dtype} {list(info.shape)} is not supported, e4m3 matrices are"
            )
        if scale is None:
            raise CheckpointError(f"{name} in {info.file}: FP8 without {name + SUFFIX} is not supported")
        blocks = blocks_of((info.shape[0], info.shape[1]), block)
        if scale.shape != blocks or scale.dtype not in dtypes:
            hint = ", and scale_fmt does not say ue8m0" if scale.dtype == "U8" and named != "ue8m0" else ""
            raise CheckpointError(
                f"{name + SUFFIX} in {scale.file} is {scale.dtype} {list(scale.shape)}, needed are floats {list(blocks)}{hint}"
            )
        found[name] = Grid(info, scale, block)
        del rest[name]
    return found | plain_tensors(rest)
