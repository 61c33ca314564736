"""Reads an artifact without the engine's code: files as they lie on the disk, numbers by the formula, torch tensors by the
names that transformers has for them.

A stored matrix `W[K, N]` is cut along K into groups of G inputs that share a scale. An int16 word is four nibbles: one of
each of the four next groups (4 bits), or low and high nibble of each of the two next (8 bits). Word p of a column's 32 is of
the input `16 h + 8 b3 + 2 lane + b0` where p = 8 lane + 4 h + 2 b3 + b0, and the words of eight columns lie together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

# Parameter of the artifact -> the modules whose rows lie in it, in order, and their shares of the columns.
_PARTS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "linear_attn.in_proj": ("in_proj_qkv", "in_proj_z"),
    "linear_attn.gate_proj": ("in_proj_a", "in_proj_b"),
}
_COLUMNS = 256  # expanded at a time: 18 MB in float32 at the MLP's 17,408 inputs, which the heap gives out again and again


class Stored:
    """An artifact's arrays by parameter name, read when asked for."""

    def __init__(self, path: Path):
        self._path, self._about = path, json.loads((path / "manifest.json").read_text())["parameters"]

    def layer(self, prefix: str, module: torch.nn.Module) -> torch.nn.Module:
        """`module`, a decoder layer of transformers made without memory, with the weights of the layer called `prefix`."""
        wanted = {name: tuple(p.shape) for name, p in module.state_dict().items()}
        found = {}
        for name in self._about:
            if name.startswith(prefix + "."):
                found |= self._tensors(name, name.removeprefix(prefix + "."), wanted)
        module.load_state_dict(found, strict=True, assign=True)
        return module

    def plain(self, name: str) -> torch.Tensor:
        """A parameter that is not quantised, by the name it has in a checkpoint, float32."""
        (field,) = self._about[name]["arrays"]
        return torch.from_numpy(np.array(self._array(name, field), np.float32))

    def matrix(self, name: str, n: int, size: int) -> torch.Tensor:
        """A quantised one, float32 `[n, size]` as torch's linear layers have it."""
        return torch.from_numpy(np.concatenate([block[:, :size] for block in self.columns(name, n)]))

    def rows(self, name: str, ids: np.ndarray) -> torch.Tensor:
        """Rows of a looked-up table, float32 `[ids, size]`."""
        about = self._about[name]
        return torch.from_numpy(table_values(self._array(name, "codes")[ids], self._array(name, "scales")[ids], about["bits"]))

    def columns(self, name: str, n: int) -> Iterator[np.ndarray]:
        """The `n` columns of a matrix without its padding as float32 rows `[columns, K]`, some at a time."""
        about = self._about[name]
        words, scales, unit = (self._array(name, field) for field in ("words", "scales", "unit"))
        for start in range(0, n, _COLUMNS):
            stop = min(start + _COLUMNS, -(-n // 8) * 8)
            part = words[:, start * 32 : stop * 32], scales[:, start:stop], unit[start:stop]
            values = matrix_values(*part, about["bits"], about["group_size"])
            yield values[: n - start]

    def _tensors(self, name: str, short: str, wanted: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        if self._about[name]["kind"] == "plain":
            return {short: self.plain(name).reshape(wanted[short])}
        module, _, last = short.rpartition(".")
        names = [f"{module}.{part}.weight" for part in _PARTS.get(short, (last,))]
        rows = [wanted[n][0] for n in names]
        whole, at, found = self.matrix(name, sum(rows), wanted[names[0]][1]), 0, {}
        for n, count in zip(names, rows, strict=True):
            found[n], at = whole[at : at + count], at + count
        return found

    def _array(self, name: str, field: str) -> np.ndarray:
        about = self._about[name]
        array, plain = about["arrays"][field], about["kind"] == "plain"
        file = self._path / "parameters" / about["group"] / (name if plain else f"{name}.{field}")
        dtype = np.dtype(getattr(ml_dtypes, array["dtype"], array["dtype"]))
        (content,) = (p for p in file.rglob("*") if p.is_file() and not p.name.startswith("."))
        return np.memmap(content, dtype, "r", shape=tuple(array["shape"]))


def matrix_values(words: np.ndarray, scales: np.ndarray, unit: np.ndarray, bits: int, group: int) -> np.ndarray:
    """int16 `[K / (16 / bits) / 32, N * 32]`, scales `[tiles, N]` of int32 (4 bits) or int16 and float32 unit `[N]` -> float32
    `[N, padded K]`."""
    p = np.arange(32)
    lane, half, b3, b0 = p >> 3, p >> 2 & 1, p >> 1 & 1, p & 1
    place = np.argsort(16 * half + 8 * b3 + 2 * lane + b0)  # of the input's word among a column's 32
    n, planes, tiles = scales.shape[1], 16 // bits, words.shape[0] * 32 // group
    ordered = np.ascontiguousarray(words).view(np.uint16).reshape(-1, n, 32).transpose(1, 0, 2)[:, :, place]
    ordered = ordered.reshape(n, tiles, group)
    meaning = np.arange(1 << bits, dtype=np.float32)
    meaning[1 << (bits - 1) :] -= 1 << bits  # two's complement
    values = np.empty((n, tiles, planes, group), np.float32)
    for plane in range(planes):
        values[:, :, plane] = meaning[ordered >> (bits * plane) & ((1 << bits) - 1)]
    values = values.reshape(n, -1, group)
    bytes_ = np.ascontiguousarray(scales.T).view(np.uint8).reshape(n, -1)  # tile by tile, its groups in order
    values *= ((bytes_.astype(np.float32) - 128) * np.asarray(unit)[:, None])[:, :, None]
    return values.reshape(n, -1)


def table_values(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes (4 bits: the even column in the low nibble) and bf16 scales `[rows, groups]` -> float32 `[rows, size]`."""
    if bits == 4:
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int16).reshape(codes.shape[0], -1)
        codes = np.where(pairs >= 8, pairs - 16, pairs)
    scaled = codes.reshape(*scales.shape, -1) * np.asarray(scales, np.float32)[..., None]
    return scaled.reshape(codes.shape[0], -1).astype(np.float32)


def text_config(path: Path) -> dict[str, Any]:
    """`text_config` of the artifact's config.json."""
    return json.loads((path / "config.json").read_text())["text_config"]
