"""What transformers computes with an artifact's numbers: its own layers, one at a time, in float32.

    python -m benchmarks.shapes.oracle ARTIFACT IDS.npy ENGINE.npz OUT.npz

Logits of every position, and the MTP head's first drafts after the token that the engine chose. transformers has no MTP
head for this architecture: one is put together from its decoder layer and norms, x = fc([norm(embedding) ; norm(hidden)]).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding

from benchmarks.shapes.stored import Stored, text_config


class Oracle:
    """The text model of an artifact directory; every layer is read, run and forgotten."""

    def __init__(self, path: Path):
        self.stored, raw = Stored(path), text_config(path)
        self.config = Qwen3_5TextConfig(**raw)
        self.config._attn_implementation = "eager"
        self.rotary = Qwen3_5TextRotaryEmbedding(self.config)

    def hidden(self, ids: np.ndarray) -> torch.Tensor:
        """Final-normed `[tokens, hidden]`."""
        h = self.stored.rows("embed_tokens", ids)[None]
        for i, kind in enumerate(self.config.layer_types):
            h = self._through(self._read_layer(f"layers.{i}", i), h)
            print(f"layer {i} ({kind})", file=sys.stderr)
        return self._norm("norm.weight", h)[0]

    def logits(self, hidden: torch.Tensor) -> np.ndarray:
        """`[tokens, hidden]` -> float32 `[tokens, vocabulary rows]`, some columns of the head at a time."""
        blocks = self.stored.columns("lm_head", self.config.vocab_size)
        return np.concatenate([(hidden @ torch.from_numpy(block[:, : hidden.shape[1]]).T).numpy() for block in blocks], axis=1)

    def drafts(self, ids: np.ndarray, hidden: torch.Tensor, given: list[int]) -> torch.Tensor:
        """Final-normed rows by which each of the drafts was chosen, `[drafts, hidden]`: ids are the prompt and the token after
        it, `given` the engine's drafts, which later ones build upon."""
        rows, following = [], ids[1:]
        layer = self._read_layer("mtp.layers.0", self.config.layer_types.index("full_attention"))
        fc = self.stored.matrix("mtp.fc", hidden.shape[1], 2 * hidden.shape[1])
        for draft in given:
            embedded = self.stored.rows("embed_tokens", following)
            parts = (self._norm("mtp.pre_fc_norm_embedding.weight", embedded), self._norm("mtp.pre_fc_norm_hidden.weight", hidden))
            x = (torch.cat(parts, dim=-1) @ fc.T)[None]
            y = self._norm("mtp.norm.weight", self._through(layer, x))[0]
            rows.append(y[-1])
            hidden, following = torch.cat([hidden, y[-1:]]), np.append(following, draft)
        return torch.stack(rows)

    def _read_layer(self, name: str, index: int) -> torch.nn.Module:
        with torch.device("meta"):
            layer = Qwen3_5DecoderLayer(self.config, index)
        return self.stored.layer(name, layer.eval())

    def _through(self, layer: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
        count = h.shape[1]
        turned = self.rotary(h, torch.arange(count).expand(3, 1, count))
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None] if hasattr(layer, "self_attn") else None
        return layer(h, position_embeddings=turned, attention_mask=mask)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Qwen3_5RMSNorm(x.shape[-1], self.config.rms_norm_eps)
        norm.weight = torch.nn.Parameter(self.stored.plain(name))
        return norm(x)


@torch.no_grad()
def main(artifact: str, ids: str, engine: str, out: str) -> None:
    tokens, chosen = np.load(ids), np.load(engine)
    oracle = Oracle(Path(artifact))
    hidden = oracle.hidden(tokens)
    extended = np.append(tokens, chosen["first"])
    drafts = oracle.drafts(extended, hidden, chosen["drafts"].tolist())
    logits = oracle.logits(torch.cat([hidden, drafts]))  # the head is the largest matrix: it is read once
    np.savez(out, logits=logits[: len(hidden)], drafts=logits[len(hidden) :])


if __name__ == "__main__":
    main(*sys.argv[1:])
