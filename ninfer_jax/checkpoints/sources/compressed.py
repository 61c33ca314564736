"""compressed-tensors: whole numbers and FP8, in one format or several ("mixed-precision").

"pack-quantized": `weight_packed` int32 `[out, ceil(in * bits / 32)]`, codes of 4 or 8 bits along `in`, lowest first, each half
the range more than its value; `weight_scale` `[out, groups]`, one group where a channel has one scale (group size -1);
`weight_shape` int64 [out, in]; asymmetric also `weight_zero_point` int32 `[ceil(out * bits / 32), groups]`, packed the same way
along `out`. weight = scale x (code - zero).

"int-quantized", "float-quantized", "naive-quantized": `weight` int8 or e4m3 and `weight_scale` for the tensor, for each
channel, for each group of inputs, or for blocks; "mxfp8-quantized": the scales are exponents (ue8m0).

Activations that are quantised there are not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.grid import EXPONENTS, FLOATS, Grid, blocks_of
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import IntegerCodes, SourceTensor, lost_codes, mapped, reshaped, signed

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized", "dense")
_KINDS = (("int", 4), ("int", 8), ("float", 8))
_ACTIVATIONS = re.compile(r".*\.((input|output)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point))")


class Packed(IntegerCodes):
    """zeros: packed along outputs (int32), plain (int8), or None."""

    def __init__(self, codes: TensorInfo, scales: TensorInfo, zeros: TensorInfo | None, bits: int, inputs: int):
        nbytes = codes.nbytes + scales.nbytes
        super().__init__((codes.shape[0], inputs), nbytes, bits, scales.shape[1], zeros is not None)
        self._codes, self._scales, self._zeros = codes, scales, zeros

    def codes(self, start: int, stop: int) -> np.ndarray:
        return signed(np.asarray(mapped(self._codes)[start:stop]), self.bits)[:, : self.shape[1]]

    def scales(self, start: int, stop: int) -> np.ndarray:
        return mapped(self._scales)[start:stop].astype(np.float32)

    def zeros(self, start: int, stop: int) -> np.ndarray:
        if self._zeros is None:
            return super().zeros(start, stop)
        if self._zeros.dtype == "I8":
            return np.asarray(mapped(self._zeros)[start:stop])
        per_word = 32 // self.bits
        first = start // per_word
        words = np.ascontiguousarray(mapped(self._zeros)[first : -(-stop // per_word)].T)
        return signed(words, self.bits)[:, start - first * per_word : stop - first * per_word].T


def compressed_tensors(
    infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any], notes: list[str]
) -> tuple[str, dict[str, SourceTensor]]:
    """The kind of quantisation, in words, and the tensors. CheckpointError, naming a tensor, for every other format of
    compressed-tensors and for act-order."""
    groups = quantization.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    _check_groups(groups, quantization, infos)
    if any(group.get("input_activations") for group in groups):
        notes.append("the checkpoint means activations to be quantised too, which they are not here")
    found: dict[str, Packed | Grid] = {}
    rest = dict(infos)
    for name in [n for n in infos if n.endswith(".weight_packed")]:
        base = name.removesuffix("_packed")
        parts = {field: rest.pop(f"{base}_{field}", None) for field in ("scale", "shape", "zero_point", "g_idx")}
        found[base] = _packed(base, _group_of(infos[name], quantization, groups), rest.pop(name), **parts)
    for name in [n for n in infos if n.endswith(".weight_scale") and n in rest]:
        base = name.removesuffix("_scale")
        weight, zeros, order = (rest.pop(f"{base}{field}", None) for field in ("", "_zero_point", "_g_idx"))
        found[base] = _grid(base, _group_of(infos[name], quantization, groups), weight, rest.pop(name), zeros, order)
    dropped = [rest.pop(name) for name in list(rest) if _ACTIVATIONS.fullmatch(name)]
    if dropped:
        notes.append(f"{len(dropped)} scales of activations and of a KV cache are left out ({dropped[0].original_name}, ...)")
    notes += lost_codes(found)
    kinds = sorted({f"int{t.bits}" if isinstance(t, Packed) else t.words for t in found.values()})
    return f"compressed-tensors {'+'.join(kinds)}", {**found, **plain_tensors(rest)}


def _as_stored(info: TensorInfo) -> str:
    return f"{info.original_name} in {info.file} is {info.dtype} {list(info.shape)}"


def _check_groups(groups: Sequence[Mapping[str, Any]], quantization: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    first = next((n for end in (".weight_packed", ".weight_scale") for n in infos if n.endswith(end)), "the config")
    formats = {str(f) for f in (quantization.get("format"), *(g.get("format") for g in groups)) if f is not None}
    for kind in sorted(formats - {*FORMATS, "mixed-precision"}):
        raise CheckpointError(f"{first}: compressed-tensors {kind} is not supported, {', '.join(FORMATS[:-1])} are")
    for group in groups:
        weights = group.get("weights") or {}
        kind = weights.get("type", "int"), weights.get("num_bits", 8)
        if kind not in _KINDS:
            raise CheckpointError(
                f"{first}: compressed-tensors with {kind[0]}{kind[1]} weights is not supported: int4, int8, float8 are"
            )


def _group_of(info: TensorInfo, quantization: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """`format` and `weights` of the group that a tensor's module is in, as far as the config tells: by name ("re:" begins a
    pattern), otherwise by "Linear"; {} if by none."""
    module = info.original_name.rpartition(".")[0]

    def by_name(target: str) -> bool:
        try:
            return target == module or (target.startswith("re:") and re.match(target[3:], module) is not None)
        except re.error:
            return False

    for fits in (by_name, "Linear".__eq__):
        for group in groups:
            targets = group.get("targets", ["Linear"])
            if isinstance(targets, list) and any(isinstance(t, str) and fits(t) for t in targets):
                return {"format": group.get("format") or quantization.get("format"), **(group.get("weights") or {})}
    return {}


def _packed(
    base: str,
    group: Mapping[str, Any],
    packed: TensorInfo,
    scale: TensorInfo | None,
    shape: TensorInfo | None,
    zero_point: TensorInfo | None,
    g_idx: TensorInfo | None,
) -> Packed:
    if g_idx is not None:
        raise CheckpointError(f"{base}_g_idx in {g_idx.file}: compressed-tensors act-order is not supported")
    if scale is None or shape is None:
        raise CheckpointError(f"{base}_packed in {packed.file} has no {base}_{'scale' if scale is None else 'shape'} beside it")
    if packed.dtype != "I32" or len(packed.shape) != 2 or shape.dtype not in ("I64", "I32") or shape.shape != (2,):
        raise CheckpointError(f"{_as_stored(packed)}, not int32 words of codes")
    outputs, wide = packed.shape
    said = mapped(shape).tolist()
    fitting = [b for b in (group.get("num_bits"), 4, 8) if b in (4, 8) and said[0] == outputs and -(-said[1] * b // 32) == wide]
    if not fitting:
        raise CheckpointError(
            f"{base}_shape in {shape.file} is {said}, {base}_packed has {outputs} rows of {wide} words: no codes of 4 or 8 bits"
        )
    bits, inputs = fitting[0], said[1]
    if group.get("num_bits") not in (None, bits):
        raise CheckpointError(f"{base}_packed in {packed.file} holds codes of {bits} bits, config_groups say {group['num_bits']}")
    if len(scale.shape) != 2 or scale.shape[0] != outputs or scale.dtype not in FLOATS:
        raise CheckpointError(f"{_as_stored(scale)}, needed are floats [{outputs}, groups]")
    groups = scale.shape[1]
    if not groups or inputs % groups:
        raise CheckpointError(f"{base}_packed in {packed.file}: {inputs} inputs cannot have {groups} scales")
    if zero_point is None and group.get("symmetric") is False:
        raise CheckpointError(
            f"{base}_packed in {packed.file} has no {base}_zero_point beside it, but is asymmetric by config_groups"
        )
    if zero_point is not None:
        wanted = {"I32": (-(-outputs * bits // 32), groups), "I8": (outputs, groups)}
        if zero_point.shape != wanted.get(zero_point.dtype):
            raise CheckpointError(f"{_as_stored(zero_point)}, needed are I32 {list(wanted['I32'])} or I8 {list(wanted['I8'])}")
    return Packed(packed, scale, zero_point, bits, inputs)


def _grid(
    base: str,
    group: Mapping[str, Any],
    weight: TensorInfo | None,
    scale: TensorInfo,
    zero_point: TensorInfo | None,
    g_idx: TensorInfo | None,
) -> Grid:
    if g_idx is not None:
        raise CheckpointError(f"{base}_g_idx in {g_idx.file}: compressed-tensors act-order is not supported")
    if weight is None or weight.dtype not in ("I8", "F8_E4M3") or len(weight.shape) != 2:
        what = "nothing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise CheckpointError(f"{base}_scale in {scale.file} scales {what}, needed is a matrix of int8 or e4m3, {base}")
    exponents = EXPONENTS if group.get("format") == "mxfp8-quantized" or "uint8" in str(group.get("scale_dtype")) else ("F8_E8M0",)
    block = _block(weight.shape, scale.shape, group)
    if block is None or scale.dtype not in (*FLOATS, *exponents):
        raise CheckpointError(
            f"{_as_stored(scale)}, needed are floats for all of {list(weight.shape)}, its rows, "
            "groups in them, or the blocks that config_groups name"
        )
    if zero_point is None and group.get("symmetric") is False:
        raise CheckpointError(f"{base} has no {base}_zero_point beside it, but is asymmetric by config_groups")
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype not in ("I8", *FLOATS)):
        raise CheckpointError(f"{_as_stored(zero_point)}, needed is I8 {list(scale.shape)}")
    blocks = blocks_of(weight.shape, block)
    return Grid(weight, reshaped(scale, *blocks), block, zero_point and reshaped(zero_point, *blocks))


def _block(shape: tuple[int, int], scale: tuple[int, ...], group: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a scale; None where the scale's shape fits none."""
    outputs, inputs = shape
    given = group.get("block_structure")
    if isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given):
        return tuple(given) if blocks_of(shape, tuple(given)) == scale else None
    if scale in ((), (1,), (1, 1)):
        return shape
    if scale[0] != outputs or len(scale) > 2:
        return None
    groups = scale[1] if len(scale) == 2 else 1
    return (1, inputs // groups) if groups and inputs % groups == 0 else None
