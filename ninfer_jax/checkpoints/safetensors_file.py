"""One `.safetensors` file: its header, checked against the file's size before any tensor data is read.

Layout (safetensors format): 8 bytes little-endian header length N, N bytes of JSON, then the tensor data. The JSON maps
each tensor name to `dtype`, `shape` and `data_offsets` [begin, end), counted from the end of the header; the extents must
cover the data exactly. The `safetensors` library refuses most broken files too, but without saying which file or tensor;
the checks here do, and the library reads the data.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes  # noqa: F401  (registers "bfloat16" with numpy, which safe_open needs)
import numpy as np
from safetensors import SafetensorError, safe_open

from ninfer_jax.files import FileError, parse_json

# The library's own limit. A larger length means that the first eight bytes are not a header length.
MAX_HEADER_BYTES = 100_000_000

_LFS_MAGIC = b"version https://git-lfs"

_DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class CheckpointError(FileError):
    """A checkpoint that cannot be loaded as it is. The message is one line and names the file or the tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """Place and type of one tensor.

    `dtype` is the code of the safetensors format ("BF16", "F32", …), `offset` the byte in `file` where the data begins,
    `nbytes` its length, `original_name` the name it carries in the file.
    """

    file: Path
    original_name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: int


def load_json(text: str | bytes, what: str) -> Any:
    """The value that `files.parse_json` reads, for a file of a checkpoint. Raises CheckpointError that begins with `what`."""
    try:
        return parse_json(text, what)
    except FileError as error:
        raise CheckpointError(f"{error}: the file is damaged, fetch it again") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads the header of one file and checks it; the tensor data stay unread.

    Returns the tensors in the order of their data. Raises CheckpointError where the file is cut short or too long, the
    header is not a safetensors header, or the extents overlap, leave a hole or do not fit dtype and shape.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) == 8 and _LFS_MAGIC.startswith(head):
            raise CheckpointError(f"{path} is a git-lfs pointer, not the weights: fetch them with git lfs pull")
        if len(head) < 8:
            raise CheckpointError(f"{path} is {size} bytes long, too short for a safetensors file: fetch it again")
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} is not a safetensors file: its first 8 bytes give a header of {length} bytes, at most "
                f"{MAX_HEADER_BYTES} is allowed"
            )
        if 8 + length > size:
            raise CheckpointError(f"{path} is cut short: its header ends at byte {8 + length}, the file at {size}; fetch it again")
        header = load_json(file.read(length), f"the header of {path}")
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {path} is a JSON {type(header).__name__}, not an object of tensors")
    header.pop("__metadata__", None)

    data_start = 8 + length
    tensors = [_parse_entry(path, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.offset + t.nbytes))
    _check_extents(path, tensors, data_start, size)
    with open_file(path):  # whatever else the library minds, it says before the load begins
        pass
    return {t.original_name: t for t in tensors}


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def naturals(value: Any) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)

    if not (
        isinstance(entry, dict)
        and isinstance(dtype := entry.get("dtype"), str)
        and naturals(shape := entry.get("shape"))
        and naturals(offsets := entry.get("data_offsets"))
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise CheckpointError(
            f"the header of {path} describes {name} as {str(entry)[:200]}; expected dtype, shape and data_offsets [begin, end]"
        )
    begin, end = offsets
    bits = _DTYPE_BITS.get(dtype)  # an unknown code is left to the library, and to whoever needs the tensor
    if bits is not None and (end - begin) * 8 != (expected := math.prod(shape) * bits):
        raise CheckpointError(
            f"the header of {path} gives {name} {end - begin} bytes, but {dtype} {shape} takes {-(-expected // 8)}"
        )
    return TensorInfo(path, name, tuple(shape), dtype, end - begin, data_start + begin)


def _check_extents(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    # `tensors` is sorted by offset.
    position, previous = data_start, "the header"
    for tensor in tensors:
        if tensor.offset != position:
            relation = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: the data of {tensor.original_name} begin at byte {tensor.offset} and not at {position}, which "
                f"{relation} {previous}; the file is damaged, fetch it again"
            )
        position, previous = tensor.offset + tensor.nbytes, tensor.original_name
    if position > size:
        lost = next(t.original_name for t in tensors if t.offset + t.nbytes > size)
        raise CheckpointError(
            f"{path} is cut short: {size} bytes, its header needs {position}, {lost} is incomplete; fetch it again"
        )
    if position < size:
        raise CheckpointError(
            f"{path} holds {size - position} bytes after its last tensor ({previous}): {size} bytes, its header needs "
            f"{position}; fetch it again"
        )


def open_file(path: Path) -> safe_open:
    """Maps a file into memory, for `with`. Raises CheckpointError naming the file where the library refuses it."""
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_tensor(file: safe_open, info: TensorInfo) -> np.ndarray:
    """Copies one tensor out of the mapped file: dtype as stored (BF16 as ml_dtypes.bfloat16), `info.shape`."""
    return file.get_tensor(info.original_name)
