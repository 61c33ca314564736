"""Tensors of a GGUF file of architecture `qwen35`, as llama.cpp's conversion writes them, turned back.

What that conversion does: zero-centred norms become 1 + w, A_log becomes -exp(A_log), the convolution loses its middle
axis, the MTP layer becomes block `layers`, and whatever runs over value heads is reordered. Here value heads that share a
key head lie side by side (head v of key head k is k * ratio + v); there they are `v * key heads + k`, "tiled".

Files that Ollama made are alike but for a few names: `ssm_dt` has no `.bias`, the vision tower is in the same file (`v.*`,
skipped), and older ones have the MTP layer under the checkpoint's own `mtp.*`, whose three outer norms stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from ninfer_jax.checkpoints.safetensors_file import CheckpointError
from ninfer_jax.checkpoints.sources.source import SourceTensor

_TOP = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight"}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MTP = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
_OUTER = frozenset(_MTP.values())
VISION = ("v.", "mm.")


@dataclass(frozen=True)
class Heads:
    """Key and value heads of the delta-rule layers, and their sizes. tiled: whether the file has value heads so."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    tiled: bool = True

    def order(self, size: int) -> np.ndarray:
        """For each row of value heads in the model's order, `size` rows a head, where the file has it."""
        heads = np.arange(self.values)
        if self.tiled:
            heads = heads.reshape(self.values // self.keys, self.keys).T.reshape(-1)
        return (heads[:, None] * size + np.arange(size)).reshape(-1)


def model_name(name: str, layers: int) -> str | None:
    """The canonical name of a GGUF tensor, None if there is none."""
    if name in _TOP:
        return _TOP[name]
    if name in _OUTER:
        return name
    if name.startswith("mtp.layers."):
        number, _, rest = name.removeprefix("mtp.layers.").partition(".")
        return f"mtp.layers.{number}.{_BLOCK[rest]}" if rest in _BLOCK else None
    head, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    if head != "blk" or not number.isdecimal():
        return None
    block = int(number)
    if block < layers:
        return f"layers.{block}.{_BLOCK[rest]}" if rest in _BLOCK else None
    if block == layers and rest in _MTP:
        return _MTP[rest]
    return f"mtp.layers.{block - layers}.{_BLOCK[rest]}" if rest in _BLOCK else None


class GGUFTensor(SourceTensor):
    def __init__(self, file: Path, found: gguf.ReaderTensor, name: str, heads: Heads):
        self._file, self._type, self._offset = file, found.tensor_type, int(found.data_offset)
        stored = tuple(int(n) for n in reversed(found.shape))
        self.nbytes = int(found.n_bytes)
        per_block, self._block_bytes = GGML_QUANT_SIZES[found.tensor_type]
        self._row_bytes = self.nbytes if stored[1:] == () else stored[-1] // per_block * self._block_bytes
        self._name = name.rpartition("linear_attn.")[2]
        self.shape = (stored[0], 1, *stored[1:]) if self._name == "conv1d.weight" else stored
        norm = name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight"))
        self._norm = norm and "linear_attn." not in name and found.name not in _OUTER
        self._rows = _row_order(self._name, self.shape[0], heads) if "linear_attn." in name else None
        self._columns = heads.order(heads.value_dim) if self._name == "out_proj.weight" else None
        if found.tensor_type == gguf.GGMLQuantizationType.Q4_0 and (self._columns is None or heads.value_dim % 32 == 0):
            self.group = 32

    def read(self, start: int, stop: int) -> np.ndarray:
        values = dequantize(self._bytes(start, stop), self._type).astype(np.float32, copy=False)
        if len(self.shape) == 1:
            values = values.reshape(-1)
            values = (values if self._rows is None else values[self._rows])[start:stop]
            if self._name == "A_log":
                return np.log(-values)
            return values - 1 if self._norm else values
        if self._columns is not None:
            values = values[:, self._columns]
        return values.reshape(stop - start, *self.shape[1:])

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Q4_0: blocks of a float16 scale and 16 bytes, codes 0..15 in their low nibbles and 16..31 in the high ones."""
        if self.group is None:
            return super().read_codes(start, stop)
        blocks = self._bytes(start, stop).reshape(stop - start, -1, self._block_bytes)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        packed = blocks[..., 2:]
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1).view(np.int8) - np.int8(8)
        codes = codes.reshape(stop - start, -1)
        if self._columns is not None:
            codes, scales = codes[:, self._columns], scales[:, self._columns[::32] // 32]
        return codes, scales

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """Stored rows of the model's rows start..stop-1; all of a vector."""
        if len(self.shape) == 1:
            return np.array(np.memmap(self._file, np.uint8, "r", self._offset, (self.nbytes,)))
        whole = np.memmap(self._file, np.uint8, "r", self._offset, (self.shape[0], self._row_bytes))
        return np.array(whole[start:stop] if self._rows is None else whole[self._rows[start:stop]])


def _row_order(name: str, rows: int, heads: Heads) -> np.ndarray | None:
    if name in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        order, first = heads.order(heads.value_dim if name == "in_proj_z.weight" else 1), 0
    elif name in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * heads.keys * heads.key_dim
        order = np.concatenate([np.arange(first), first + heads.order(heads.value_dim)])
    else:
        return None
    return order if len(order) == rows else None  # a wrong shape is reported by whoever compares it with the model's


def gguf_tensors(readers: Mapping[Path, gguf.GGUFReader], layers: int, heads: Heads) -> dict[str, SourceTensor]:
    """All but those of the vision tower. CheckpointError for a tensor that the model has no name for, one held twice, and a
    type that is not decoded."""
    found: dict[str, SourceTensor] = {}
    decoded: set[gguf.GGMLQuantizationType] = set()
    for file, reader in readers.items():
        for tensor in reader.tensors:
            if tensor.name.startswith(VISION):
                continue
            name = model_name(tensor.name, layers)
            if name is None:
                raise CheckpointError(f"{tensor.name} in {file}: the model has no such tensor")
            if name in found:
                raise CheckpointError(f"{tensor.name} in {file} is held twice")
            if tensor.tensor_type not in decoded:
                try:
                    dequantize(np.zeros(GGML_QUANT_SIZES[tensor.tensor_type][1], np.uint8), tensor.tensor_type)
                except NotImplementedError:
                    raise CheckpointError(
                        f"{tensor.name} in {file}: GGUF type {tensor.tensor_type.name} is not supported"
                    ) from None
                decoded.add(tensor.tensor_type)
            found[name] = GGUFTensor(file, tensor, name, heads)
    return found
