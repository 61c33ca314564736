"""KV-cache codecs: pure functions from K and V vectors to packed bytes and back."""

from pallas_kernels.kv_codecs.codec import decode, decode_stored, encode
from pallas_kernels.kv_codecs.formats import Packed, bytes_per_vector, packed_struct, uses_rotation
from pallas_kernels.kv_codecs.rotation import rotate
from pallas_kernels.kv_formats import FORMATS, check_format

__all__ = [
    "FORMATS",
    "Packed",
    "bytes_per_vector",
    "check_format",
    "decode",
    "decode_stored",
    "encode",
    "packed_struct",
    "rotate",
    "uses_rotation",
]
