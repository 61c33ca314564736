"""Random checkpoints written by transformers, and what transformers computes with them: the oracle of this folder.

transformers has no MTP head for this architecture. `Reference.drafts` and `Reference.mtp` build one from its own decoder
layer, norm and rotary embedding: x_t = fc([norm(embed(token t+1)) ; norm(hidden t)]), y = norm(layer(x)), logits = head(y)
for token t + 2.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

VOCAB = 320


@dataclasses.dataclass(frozen=True)
class Case:
    """A geometry. `vision_language` saves with the class that adds a vision tower and the prefix `model.language_model.`."""

    ratio: int  # value heads a key head
    layers: int
    tied: bool
    vision_language: bool = False
    key_dim: int = 32
    value_dim: int = 32
    conv_width: int = 4
    query_heads: int = 4
    kv_heads: int = 2
    interval: int = 4  # every how many layers one is full attention
    seed: int = 0

    def text_config(self) -> dict:
        rope = dict(
            rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True
        )
        return dict(
            vocab_size=VOCAB,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=self.layers,
            full_attention_interval=self.interval,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=64,
            rms_norm_eps=1e-6,
            linear_num_key_heads=2,
            linear_num_value_heads=2 * self.ratio,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            linear_conv_kernel_dim=self.conv_width,
            max_position_embeddings=4096,
            rope_parameters=rope,
            partial_rotary_factor=0.25,
            tie_word_embeddings=self.tied,
            mtp_num_hidden_layers=1,
            attn_output_gate=True,
            output_gate_type="swish",
            mamba_ssm_dtype="float32",
            mtp_use_dedicated_embeddings=False,
        )


CASES = {
    "ratio3-8layers": Case(ratio=3, layers=8, tied=False, vision_language=True, query_heads=6),
    "ratio1-4layers-tied": Case(ratio=1, layers=4, tied=True, conv_width=3, seed=1),
    "ratio2-4layers": Case(ratio=2, layers=4, tied=False, value_dim=64, query_heads=2, interval=2, seed=2),
    "ratio2-8layers-tied": Case(ratio=2, layers=8, tied=True, vision_language=True, key_dim=64, kv_heads=1, seed=3),
    "ratio3-4layers": Case(ratio=3, layers=4, tied=False, seed=4),
}


@dataclasses.dataclass(frozen=True)
class Forward:
    """One sequence through the text tower, float32 NumPy. hidden `[tokens, hidden]` after the final norm, logits `[tokens,
    vocab]`; one array a layer: recurrent `[value_heads, key_dim, value_dim]`, conv `[width - 1, channels]` oldest first,
    keys (after RoPE) and values `[tokens, kv_heads, head_dim]`."""

    hidden: np.ndarray
    logits: np.ndarray
    recurrent: list[np.ndarray]
    conv: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]


class MTP(torch.nn.Module):
    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        size = config.hidden_size
        one_layer = copy.deepcopy(config)
        one_layer.layer_types, one_layer.num_hidden_layers = ["full_attention"], 1
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(one_layer, 0)])
        self.norm = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.cache_config = one_layer


class Reference:
    """A random model, saved under `directory` (float32)."""

    def __init__(self, case: Case, directory: Path):
        self.directory = directory
        if case.vision_language:
            tower = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=96, num_position_embeddings=16)
            text = case.text_config() | {"model_type": "qwen3_5_text"}
            config = Qwen3_5Config(text_config=text, vision_config=tower, tie_word_embeddings=case.tied)
            config._attn_implementation = "eager"
            model = Qwen3_5ForConditionalGeneration(config)
            self.text = model.model.language_model
        else:
            config = Qwen3_5TextConfig(**case.text_config())
            config._attn_implementation = "eager"
            model = Qwen3_5ForCausalLM(config)
            self.text = model.model
        self.head = model.lm_head
        self.mtp_module = MTP(self.text.config)
        model.eval().float()
        _randomise(model, case.seed)
        _randomise(self.mtp_module, case.seed + 100)
        model.save_pretrained(directory)
        file = directory / "model.safetensors"
        mtp = {f"mtp.{name}": tensor for name, tensor in self.mtp_module.state_dict().items()}
        save_file(load_file(file) | mtp, file, metadata={"format": "pt"})

    @torch.no_grad()
    def forward(self, ids: np.ndarray, positions: np.ndarray | None = None) -> Forward:
        """ids int `[tokens]`; positions int `[3, tokens]`, the token's index on all three axes when absent."""
        tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long)[None]
        where = None if positions is None else torch.as_tensor(positions, dtype=torch.long)[:, None]
        out = self.text(input_ids=tokens, position_ids=where, use_cache=True)
        layers = list(zip(self.text.config.layer_types, out.cache.layers, strict=True))
        linear = [layer for kind, layer in layers if kind == "linear_attention"]
        full = [layer for kind, layer in layers if kind == "full_attention"]
        return Forward(
            hidden=out.last_hidden_state[0].numpy(),
            logits=self.head(out.last_hidden_state)[0].numpy(),
            recurrent=[layer.recurrent_states[0][0].numpy() for layer in linear],
            # transformers keeps one raw input more than the next token needs.
            conv=[layer.conv_states[0][0].T[1:].numpy() for layer in linear],
            keys=[layer.keys[0].transpose(0, 1).numpy() for layer in full],
            values=[layer.values[0].transpose(0, 1).numpy() for layer in full],
        )

    @torch.no_grad()
    def greedy(self, prompt: np.ndarray, count: int) -> np.ndarray:
        """The prompt and its `count` most likely next tokens, through transformers' own cache."""
        ids, tokens, cache = list(prompt), torch.as_tensor(np.asarray(prompt), dtype=torch.long)[None], None
        for _ in range(count):
            out = self.text(input_ids=tokens, cache=cache, use_cache=True)
            tokens, cache = self.head(out.last_hidden_state[:, -1:]).argmax(-1), out.cache
            ids.append(int(tokens))
        return np.array(ids)

    @torch.no_grad()
    def mtp(self, hidden: np.ndarray, next_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The head over slots 0, 1, ...: hidden `[slots, hidden]` and next_ids `[slots]` -> normed output `[slots, hidden]`, logits
        `[slots, vocab]`, keys and values `[slots, kv_heads, head_dim]`."""
        m, count = self.mtp_module, len(next_ids)
        embedded = self.text.embed_tokens(torch.as_tensor(np.asarray(next_ids), dtype=torch.long))
        h = torch.as_tensor(np.asarray(hidden))
        x = m.fc(torch.cat([m.pre_fc_norm_embedding(embedded), m.pre_fc_norm_hidden(h)], dim=-1))[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        turned = self.text.rotary_emb(x, torch.arange(count).expand(3, 1, count))
        cache = DynamicCache(config=m.cache_config)
        y = m.norm(m.layers[0](x, position_embeddings=turned, attention_mask=mask, cache=cache))
        keys, values = (t[0].transpose(0, 1).numpy() for t in (cache.layers[0].keys, cache.layers[0].values))
        return y[0].numpy(), self.head(y)[0].numpy(), keys, values

    def drafts(self, ids: np.ndarray, count: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Greedy drafts for what follows `ids`, whose last token the target has not consumed. Every draft recomputes the
        head from slot 0, so nothing of earlier guesses can remain. Returns the drafts and the keys and values behind the
        last of them."""
        ids = np.asarray(ids)
        hidden, following, drafts = self.forward(ids[:-1]).hidden, ids[1:], []
        while True:
            y, logits, keys, values = self.mtp(hidden, following)
            drafts.append(int(logits[-1].argmax()))
            if len(drafts) == count:
                return drafts, keys, values
            hidden, following = np.concatenate([hidden, y[-1:]]), np.append(following, drafts[-1])


@torch.no_grad()
def _randomise(module: torch.nn.Module, seed: int) -> None:
    """Every parameter away from its initial value, at scales that keep activations near 1 and some delta-rule heads slow,
    others fast."""
    random = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        x = torch.randn(p.shape, generator=random)
        if ".visual." in name:
            continue
        if name.endswith("A_log"):
            x = torch.log(0.02 + 2 * torch.rand(p.shape, generator=random))
        elif name.endswith("dt_bias"):
            pass
        elif name.endswith("linear_attn.norm.weight"):
            x = 1 + 0.3 * x
        elif p.ndim == 1:
            x = 0.3 * x
        elif "embed_tokens" in name:
            pass
        elif "conv1d" in name:
            x = 0.5 * x
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            x = 0.5 * x / p.shape[1] ** 0.5  # into the residual stream: smaller, or rounding grows with every layer
        else:
            x = x / p.shape[1] ** 0.5
        p.copy_(x)
