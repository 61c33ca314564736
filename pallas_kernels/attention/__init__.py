"""Attention over paged, possibly quantised keys and values: append, decode/verify rows, prefill chunks."""

from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.attention.pages import PAGE, KVPages, append, pages_struct, read_tokens
from pallas_kernels.attention.prefill import prefill_attention

__all__ = ["PAGE", "KVPages", "append", "decode_attention", "pages_struct", "prefill_attention", "read_tokens"]
