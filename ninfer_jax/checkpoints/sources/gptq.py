"""GPTQ's layout, which AutoRound writes too: `qweight` int32 `[in * bits / 32, out]`, codes packed along `in`, lowest first;
`scales` `[in / group, out]`; `qzeros` int32 `[in / group, out * bits / 32]`; weight = scale x (code - zero).

Codes have 4 or 8 bits. The tensors' shapes say how many, since `dynamic` (GPTQModel) and `extra_config` (AutoRound) give
single modules other bits and groups than the rest. Symmetric means a zero of half the range everywhere, 8 or 128. The first
form of the format ("gptq") stores a zero less one, the second ("gptq_v2") as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo
from ninfer_jax.checkpoints.sources.plain import plain_tensors
from ninfer_jax.checkpoints.sources.source import IntegerCodes, SourceTensor, lost_codes, mapped, signed, unpacked

BITS = (4, 8)
_FORMS = {"gptq": 1, "gptq_v2": 0}  # what a stored zero lacks


class GPTQ(IntegerCodes):
    """lacks: what is to be added to stored zeros; None where all of them are half the range."""

    def __init__(self, codes: TensorInfo, scales: TensorInfo, zeros: TensorInfo, bits: int, lacks: int | None):
        shape = (codes.shape[1], 32 // bits * codes.shape[0])
        super().__init__(shape, codes.nbytes + scales.nbytes, bits, scales.shape[0], lacks is not None)
        self._codes, self._scales, self._zeros, self._lacks, self._half = codes, scales, zeros, lacks, 1 << (bits - 1)

    def codes(self, start: int, stop: int) -> np.ndarray:
        words = np.ascontiguousarray(mapped(self._codes)[:, start:stop].T)
        return signed(words, self.bits)

    def scales(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(mapped(self._scales)[:, start:stop].T, np.float32)

    def zeros(self, start: int, stop: int) -> np.ndarray:
        if self._lacks is None:
            return super().zeros(start, stop)
        per_word = 32 // self.bits
        first = start // per_word
        words = np.ascontiguousarray(mapped(self._zeros)[:, first : -(-stop // per_word)])
        stored = unpacked(words, self.bits)[:, start - first * per_word : stop - first * per_word]
        return stored.T.astype(np.int16) + np.int16(self._lacks - self._half)


def gptq_tensors(infos: Mapping[str, TensorInfo], quantization: Mapping[str, Any], notes: list[str]) -> dict[str, SourceTensor]:
    """CheckpointError, naming the tensor, for other bits, layouts and groups, for act-order, and for zero points whose form
    the config leaves open."""
    method = str(quantization.get("quant_method"))
    packing = str(quantization.get("packing_format", ""))
    form = quantization.get("checkpoint_format", quantization.get("format") if quantization.get("format") in _FORMS else None)
    bases = [n.removesuffix(".qweight") for n in infos if n.endswith(".qweight")]
    first = f"{bases[0]}.qweight" if bases else "the config"
    if quantization.get("bits") not in BITS:
        raise CheckpointError(f"{first}: {method} with {quantization.get('bits')} bits is not supported, 4 and 8 are")
    if "awq" in packing or form not in (None, *_FORMS):
        raise CheckpointError(f"{first}: {method} packed as {packing or form} is not supported")
    found: dict[str, SourceTensor] = {}
    rest = dict(infos)
    for base in bases:
        parts = {field: rest.pop(f"{base}.{field}", None) for field in ("qzeros", "scales", "g_idx")}
        found[f"{base}.weight"] = _tensor(base, quantization, form, rest.pop(f"{base}.qweight"), **parts)
    notes += lost_codes(found)
    return found | plain_tensors(rest)


def module_settings(quantization: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings of a quantization_config for one module, by its name in the file: `dynamic` of GPTQModel (patterns from the
    beginning of the name, the first that fits; "-:" leaves modules out) or `extra_config` of AutoRound before the rest."""
    own: Mapping[str, Any] = {}
    for key, matches in (("dynamic", re.match), ("extra_config", re.search)):
        for pattern, settings in (quantization.get(key) or {}).items():
            text = pattern.removeprefix("+:")
            try:
                fits = not text.startswith("-:") and (text == module or matches(text, module))
            except re.error:
                fits = False
            if fits and isinstance(settings, Mapping):
                own = own or settings
    return {**quantization, **own}


def _tensor(
    base: str,
    quantization: Mapping[str, Any],
    form: str | None,
    qweight: TensorInfo,
    qzeros: TensorInfo | None,
    scales: TensorInfo | None,
    g_idx: TensorInfo | None,
) -> GPTQ:
    if qzeros is None or scales is None:
        raise CheckpointError(f"{base}.qweight in {qweight.file} has no {'qzeros' if qzeros is None else 'scales'} beside it")
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or qweight.dtype != "I32" or qzeros.dtype != "I32":
        raise CheckpointError(f"{base}.qweight in {qweight.file} is {qweight.dtype} {list(qweight.shape)}, not GPTQ's int32 matrix")
    settings = module_settings(quantization, qweight.original_name.removesuffix(".qweight"))
    groups, outputs = scales.shape
    bits = _bits(base, qzeros, (groups, outputs), settings)
    inputs = 32 // bits * qweight.shape[0]
    if not groups or inputs % groups or qweight.shape[1] != outputs:
        raise CheckpointError(
            f"{base}.qweight in {qweight.file}: {outputs} outputs of {inputs} inputs do not go with {groups} x {outputs} scales"
        )
    if scales.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"{base}.scales in {scales.file} is {scales.dtype}, needed are floats")
    if g_idx is not None:
        order = mapped(g_idx)
        if order.shape != (inputs,) or (order != np.arange(inputs) // (inputs // groups)).any():
            raise CheckpointError(f"{base}.g_idx in {g_idx.file}: act-order (columns in another order) is not supported")
    elif settings.get("desc_act"):
        raise CheckpointError(f"{base}.qweight in {qweight.file}: act-order (desc_act) without g_idx is not supported")
    return GPTQ(qweight, scales, qzeros, bits, _zeros(base, qzeros, settings, form, bits, outputs))


def _bits(base: str, qzeros: TensorInfo, shape: tuple[int, int], settings: Mapping[str, Any]) -> int:
    groups, outputs = shape
    if len(qzeros.shape) == 2 and qzeros.shape[0] == groups:
        # Few outputs may leave it open: then it is as the config says.
        fitting = [b for b in (settings.get("bits"), 2, 3, 4, 8) if isinstance(b, int) and -(-outputs * b // 32) == qzeros.shape[1]]
        if fitting and fitting[0] in BITS:
            return fitting[0]
        if fitting:
            raise CheckpointError(f"{base}.qweight: codes of {fitting[0]} bits are not supported, 4 and 8 are")
    raise CheckpointError(
        f"{base}.qzeros in {qzeros.file} has shape {list(qzeros.shape)}, {groups} x {outputs} zeros of 4 or 8 bits are needed"
    )


def _zeros(base: str, qzeros: TensorInfo, settings: Mapping[str, Any], form: str | None, bits: int, outputs: int) -> int | None:
    """The number that stored zeros lack, None where all of them are half the range."""
    half, where = 1 << (bits - 1), f"{base}.qzeros in {qzeros.file}"
    zeros = unpacked(np.asarray(mapped(qzeros)), bits)[:, :outputs]
    # Where the form is not named, a constant half, or half less one, that the config calls symmetric can mean only one thing.
    symmetric = (half - _FORMS[form],) if form else (half - 1, half) if settings.get("sym") is True else (half - 1,)
    if any((zeros == zero).all() for zero in symmetric):
        return None
    if settings.get("sym") is True:
        raise CheckpointError(
            f"{where}: asymmetric int{bits} (zero points), but quantization_config says sym: one of them is wrong"
        )
    if form is None and str(settings.get("packing_format", "")).endswith("auto_gptq"):
        form = "gptq"
    if form is None:
        raise CheckpointError(
            f"{where}: asymmetric int{bits} (zero points), and quantization_config does not say in which form they are stored "
            f"(checkpoint_format: {' or '.join(_FORMS)})"
        )
    if _FORMS[form] and (zeros == 2 * half - 1).any():
        raise CheckpointError(
            f"{where}: asymmetric int{bits} with a stored zero of {2 * half - 1}: {2 * half} to some readers, 0 to others"
        )
    return _FORMS[form]
