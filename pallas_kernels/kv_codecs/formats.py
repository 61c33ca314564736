"""Names, stored shapes and byte counts of the KV-cache formats.

One *vector* is the key or the value of one token in one KV head, `head_dim` numbers. Every format stores it as `codes` and,
if it needs them, `scales`; the leading axes of the input stay in front of both, so the same layout serves one token, a
chunk, or a pool of pages `[pages, kv_heads, 64, ...]`. docs/kv_formats.md has the bit-exact layouts and the measured
signal-to-noise ratios.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_formats import ROTATION_GROUP, check_format

PARTS = ("k", "v")

SCALE_GROUP = 32  # dims under one 4-bit scale byte
WORD_DIMS = 8  # 4-bit codes in one uint32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Encoded vectors; a pytree whose leaves are arrays, or `jax.ShapeDtypeStruct`s while nothing is allocated.

    codes: `[..., head_dim]` float32, bfloat16 or int8, or `[..., head_dim / 8]` uint32 for the 4-bit formats.
    scales: `[..., head_dim / 64]` float16 for int8 codes, `[..., head_dim / 32]` uint8 for 4-bit codes, None for f32 and bf16.
    """

    codes: Any
    scales: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of both leaves together."""
        return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(self))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Storage of one part (K or V) of a format: code and scale dtypes, dims per stored element, and whether the values
    are rotated."""

    kind: str  # "float", "int8", "int4" or "e8"
    code_dtype: Any
    dims_per_code: int
    scale_dtype: Any
    dims_per_scale: int
    rotated: bool


_F32 = Layout("float", jnp.float32, 1, None, 0, False)
_BF16 = Layout("float", jnp.bfloat16, 1, None, 0, False)
_INT8 = Layout("int8", jnp.int8, 1, jnp.float16, ROTATION_GROUP, False)
_ROTATED_INT8 = dataclasses.replace(_INT8, rotated=True)
_INT4 = Layout("int4", jnp.uint32, WORD_DIMS, jnp.uint8, SCALE_GROUP, True)
_E8 = dataclasses.replace(_INT4, kind="e8")

_LAYOUTS = {  # format -> (layout of K, layout of V)
    "f32": (_F32, _F32),
    "bf16": (_BF16, _BF16),
    "int8": (_INT8, _INT8),
    "rk8v4": (_ROTATED_INT8, _INT4),
    "rk4v4": (_INT4, _INT4),
    "rk4v4-e8": (_E8, _E8),
}


def layout_of(format: str, part: str, head_dim: int | None = None) -> Layout:
    """The stored layout of K (`part="k"`) or V (`part="v"`); ValueError on an unknown format, part, or unfit `head_dim`."""
    check_format(format, head_dim)
    if part not in PARTS:
        raise ValueError(f"kv part {part!r} is unknown; known parts: {', '.join(PARTS)}")
    return _LAYOUTS[format][PARTS.index(part)]


def uses_rotation(format: str) -> bool:
    """Whether K and V are stored rotated. If so, attention over `decode_stored` values must rotate Q and rotate its output back."""
    return layout_of(format, "k").rotated


def packed_struct(format: str, part: str, leading_shape: tuple[int, ...], head_dim: int) -> Packed:
    """Shapes and dtypes of `prod(leading_shape)` encoded vectors as `jax.ShapeDtypeStruct` leaves, for allocating a page pool."""
    layout = layout_of(format, part, head_dim)
    leading_shape = tuple(leading_shape)
    codes = jax.ShapeDtypeStruct((*leading_shape, head_dim // layout.dims_per_code), layout.code_dtype)
    if layout.scale_dtype is None:
        return Packed(codes)
    return Packed(codes, jax.ShapeDtypeStruct((*leading_shape, head_dim // layout.dims_per_scale), layout.scale_dtype))


def bytes_per_vector(format: str, part: str, head_dim: int) -> int:
    """Stored bytes of one K (or V) vector, scales included."""
    return packed_struct(format, part, (), head_dim).nbytes
