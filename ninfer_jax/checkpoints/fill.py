"""Fills the engine's parameters from a checkpoint.

The engine says which tensors it wants (`TensorSpec`); this module finds each one, checks all of them by their headers
before the first is read, then reads, converts and hands over one tensor at a time. A tensor that is missing, unknown,
of another shape or not finite stops the load: nothing is ever replaced by zeros or random numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ninfer_jax.checkpoints.checkpoint import Checkpoint, some_names
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, TensorInfo, open_file, read_tensor

SOURCE_DTYPES = ("BF16", "F16", "F32")
TARGET_DTYPES = ("bfloat16", "float16", "float32")

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"

# Unsigned type of the same width and the exponent bits, which are all set in infinities and NaNs and only there.
_EXPONENT = {"bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00), "float32": (np.uint32, 0x7F800000)}
# Elements looked at per step: the temporaries of one step (at most 1.5 MiB) stay in the cache.
_SCAN = 1 << 18
_COMPARE_BYTES = 1 << 24


@dataclass(frozen=True)
class TensorSpec:
    """One tensor the engine wants.

    `name` is canonical (see `ninfer_jax.checkpoints.checkpoint.canonical_name`), `dtype` the dtype to hand over: bfloat16,
    float16 or float32. `role` ("embed", "attention", "gdn", …) is the engine's own note; nothing here depends on it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    def __post_init__(self):
        if self.dtype not in TARGET_DTYPES:
            raise ValueError(f"dtype of {self.name} is {self.dtype!r}, allowed are {', '.join(TARGET_DTYPES)}")


Progress = Callable[[int, int, str], None]


def load_parameters(
    checkpoint: Checkpoint,
    specs: Sequence[TensorSpec],
    *,
    ignore_prefixes: Sequence[str] = (),
    progress: Progress | None = None,
    device_put: Callable[[np.ndarray], Any] | None = None,
) -> dict[str, Any]:
    """Loads every tensor of `specs` and returns them by canonical name, in the order of `specs`.

    Beside the result, host memory holds one tensor at a time, as stored and as converted. `device_put` takes each array
    and returns what to keep (default: the numpy array); its work is waited for before the next tensor is read, so that
    transfers do not pile up. `progress(nbytes_done, nbytes_total, name)` is called after each tensor, in bytes as stored.
    Errors and `ignore_prefixes` are those of `iter_parameters`.
    """
    total = sum(checkpoint.tensors[s.name].nbytes for s in specs if s.name in checkpoint.tensors)
    done = 0
    loaded: dict[str, Any] = {}
    for spec, array in iter_parameters(checkpoint, specs, ignore_prefixes=ignore_prefixes):
        loaded[spec.name] = array if device_put is None else jax.block_until_ready(device_put(array))
        del array  # not to be kept while the next one is read
        done += checkpoint.tensors[spec.name].nbytes
        if progress is not None:
            progress(done, total, spec.name)
    return {spec.name: loaded[spec.name] for spec in specs}


def iter_parameters(
    checkpoint: Checkpoint, specs: Sequence[TensorSpec], *, ignore_prefixes: Sequence[str] = ()
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Checks everything the headers tell, then yields (spec, array) one by one in the order of the files.

    For callers who must not keep all arrays, a quantiser for instance. Arrays have `spec.shape` and `spec.dtype`.

    A tensor that no spec names is refused unless its canonical name begins with one of `ignore_prefixes`, such as
    `("mtp.",)` for an engine without the MTP head; `visual.*` is never looked at. Where the specs hold no
    `lm_head.weight` (tied embeddings) a stored head is accepted if its bytes equal those of the embedding.

    Raises CheckpointError, before the first tensor is yielded, for missing and unknown tensors, wrong shapes, dtypes other
    than BF16, F16 and F32, and a head unlike the embedding it is tied to; while iterating, for a tensor that holds NaN or
    infinity or a value outside the range of the wanted dtype. Raises ValueError for a spec given twice.
    """
    wanted = {spec.name: spec for spec in specs}
    if len(wanted) != len(specs):
        names = [spec.name for spec in specs]
        raise ValueError(f"specs name {next(n for n in names if names.count(n) > 1)} twice")
    _check_headers(checkpoint, wanted, tuple(ignore_prefixes))
    return _read_all(checkpoint, specs)


def _check_headers(checkpoint: Checkpoint, wanted: dict[str, TensorSpec], ignored: tuple[str, ...]) -> None:
    tensors = checkpoint.tensors
    relevant = {n: t for n, t in tensors.items() if n in wanted or not n.startswith(ignored)}

    # First, because a quantised checkpoint would otherwise be reported as one with odd names and shapes.
    for name, info in relevant.items():
        if info.dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"{name} in {info.file} is {info.dtype}, allowed are {', '.join(SOURCE_DTYPES)}: convert it first, or take "
                "the unquantised checkpoint"
            )

    missing = [n for n in wanted if n not in tensors]
    if missing:
        hint = ""
        if HEAD in missing:
            hint = "; if the head shares the embedding, the config must set tie_word_embeddings to true"
        elif all(n.startswith("mtp.") for n in missing):
            hint = "; without the whole MTP head, speculation must be off"
        raise CheckpointError(f"{checkpoint.path} lacks {len(missing)} of {len(wanted)} tensors: {some_names(missing)}{hint}")

    extra = {n: t for n, t in relevant.items() if n not in wanted}
    if EMBEDDING in wanted and HEAD in extra:
        _check_tied(extra.pop(HEAD), tensors[EMBEDDING])
    if extra:
        first = next(iter(extra.values()))
        hint = "; to leave the MTP head unread, ignore mtp." if all(n.startswith("mtp.") for n in extra) else ""
        raise CheckpointError(
            f"{checkpoint.path} holds {len(extra)} tensors the model does not have: {some_names(extra)} (the first in "
            f"{first.file}){hint}"
        )

    wrong = [n for n, spec in wanted.items() if tensors[n].shape != tuple(spec.shape)]
    if wrong:
        name, info = wrong[0], tensors[wrong[0]]
        more = f"; {len(wrong) - 1} more tensors differ" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{name} in {info.file} has shape {list(info.shape)}, the config asks for {list(wanted[name].shape)}{more}"
        )


def _check_tied(head: TensorInfo, embedding: TensorInfo) -> None:
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if same:
        with head.file.open("rb") as a, embedding.file.open("rb") as b:
            a.seek(head.offset)
            b.seek(embedding.offset)
            left = head.nbytes
            while same and left:
                step = min(left, _COMPARE_BYTES)
                same = a.read(step) == b.read(step)
                left -= step
    if not same:
        raise CheckpointError(
            f"{HEAD} in {head.file} differs from {EMBEDDING} in {embedding.file}, but the config ties them: set "
            "tie_word_embeddings to false or remove the head"
        )


def _read_all(checkpoint: Checkpoint, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    # In the order of the data, so that a cold disk is read in one sweep.
    def place(spec: TensorSpec) -> tuple[str, int]:
        info = checkpoint.tensors[spec.name]
        return str(info.file), info.offset

    ordered = sorted(specs, key=place)
    for _, group in groupby(ordered, key=lambda spec: place(spec)[0]):
        group = list(group)
        with open_file(checkpoint.tensors[group[0].name].file) as file:
            for spec in group:
                info = checkpoint.tensors[spec.name]
                yield spec, convert(read_tensor(file, info), spec, info)


def convert(array: np.ndarray, spec: TensorSpec, info: TensorInfo) -> np.ndarray:
    """Converts a tensor as stored to `spec.dtype`, rounding to nearest even; the same array if the dtypes agree.

    Raises CheckpointError if a value is NaN or infinite, or becomes infinite in the narrower dtype.
    """
    _refuse_non_finite(array, spec, info, "")
    target = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    if array.dtype == target:
        return array
    with np.errstate(over="ignore"):  # found right below, by name
        converted = array.astype(target)
    if target != np.float32:
        _refuse_non_finite(converted, spec, info, f" after conversion from {info.dtype} to {spec.dtype}")
    return converted


def _refuse_non_finite(array: np.ndarray, spec: TensorSpec, info: TensorInfo, when: str) -> None:
    unsigned, exponent = _EXPONENT[array.dtype.name]
    exponent = unsigned(exponent)
    bits = array.reshape(-1).view(unsigned)
    for start in range(0, bits.size, _SCAN):
        bad = (bits[start : start + _SCAN] & exponent) == exponent
        if bad.any():
            first = start + int(bad.argmax())
            where = [int(i) for i in np.unravel_index(first, array.shape)]
            raise CheckpointError(f"{spec.name} in {info.file} holds {array.reshape(-1)[first]} at {where}{when}")
