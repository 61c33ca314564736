"""The reduced head that drafts choose from: some rows of the output head, picked by how often a text uses their tokens.

A draft only has to be right often, and the whole head is the most expensive thing that drafting reads.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ninfer_jax.checkpoints.sources import Source, SourceTensor
from ninfer_jax.config import ModelConfig
from ninfer_jax.text import Tokenizer

HEAD, DRAFT_HEAD, DRAFT_IDS = "lm_head.weight", "mtp.draft_head.weight", "mtp.draft_ids"


def pick_ids(tokenizer: Tokenizer, text: str, count: int, forced: Sequence[int] = ()) -> np.ndarray:
    """`count` token ids, int32, rising: the special ones and `forced`, then the most frequent in `text`, then the lowest
    (vocabularies are built from the most frequent pairs on). ValueError for a count that cannot be had."""
    must = sorted({*tokenizer.special_ids, *forced})
    if not len(must) <= count <= tokenizer.vocab_size:
        raise ValueError(
            f"draft head: {count} rows, must be from {len(must)} (special tokens) to {tokenizer.vocab_size} (the vocabulary)"
        )
    frequent = [token for token, _ in collections.Counter(tokenizer.encode(text)).most_common()]
    order = dict.fromkeys([*must, *frequent, *range(tokenizer.vocab_size)])
    return np.array(sorted(list(order)[:count]), np.int32)


def with_draft_head(source: Source, ids: np.ndarray) -> Source:
    """`source` with the head's rows `ids` as one tensor more. ValueError where it has no head of its own or no MTP head."""
    if HEAD not in source.tensors:
        raise ValueError(f"{source.path}: a draft head needs an output head of its own, this one is tied to the embedding")
    if not source.has_mtp:
        more = next((f"; {note}" for note in source.notes if "--mtp" in note), "")
        raise ValueError(f"{source.path}: a draft head needs an MTP head, there are no mtp.* tensors{more}")
    if not ModelConfig.from_hf(source.config, source.tensors).mtp_layers:
        raise ValueError(
            f"{source.path}: a draft head needs an MTP head, but mtp_num_hidden_layers is 0 in config.json: set it to 1"
        )
    tensors: Mapping[str, SourceTensor] = {**source.tensors, DRAFT_HEAD: _Picked(source.tensors[HEAD], ids)}
    return dataclasses.replace(source, tensors=tensors)


class _Picked(SourceTensor):
    """Rows `ids` of a tensor."""

    def __init__(self, whole: SourceTensor, ids: np.ndarray):
        self._whole, self._ids = whole, ids
        self.shape = (len(ids), *whole.shape[1:])
        self.nbytes = whole.nbytes // whole.shape[0] * len(ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        ids = self._ids[start:stop]
        out = np.empty((len(ids), *self.shape[1:]), np.float32)
        # Neighbours are read together: frequent tokens have low ids, so runs are long.
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        at = 0
        for run in np.split(ids, breaks):
            out[at : at + len(run)] = self._whole.read(int(run[0]), int(run[-1]) + 1)
            at += len(run)
        return out
