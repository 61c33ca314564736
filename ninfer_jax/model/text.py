"""The text tower and its MTP head, as Flax modules whose parameters are described before they are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.config import FULL, ModelConfig, Recipe
from ninfer_jax.model.attention import Attend, Attention
from ninfer_jax.model.gdn import GatedDeltaNet, Recur
from ninfer_jax.model.layers import MLP, Embedding, QuantisedLinear, RMSNorm, describe, projection
from ninfer_jax.model.rope import rotary
from pallas_kernels.matmul import HEAD_ROWS, head_candidates, linear

AttendAt = Callable[[int, Attention, jax.Array], jax.Array]
RecurAt = Callable[[int, GatedDeltaNet, jax.Array, jax.Array], jax.Array]


class DecoderLayer(nnx.Module):
    """h += mixer(norm(h)); h += mlp(norm(h)). One of `self_attn` and `linear_attn` exists."""

    def __init__(self, config: ModelConfig, kind: str, dtype: jnp.dtype, recipe: Recipe | None = None, role: str | None = None):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, recipe)
        if kind == FULL:
            self.self_attn = Attention(config, dtype, role or "attention", recipe)
        else:
            self.linear_attn = GatedDeltaNet(config, dtype, recipe)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, recipe)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype, role or "mlp", recipe)

    def attention(self, h: jax.Array, attend: Attend) -> jax.Array:
        """h `[tokens, hidden]`; `attend` maps projections to gated values."""
        return self.mlp(self.self_attn(h, self.input_layernorm, attend), self.post_attention_layernorm)

    def linear_attention(self, h: jax.Array, recur: Recur) -> jax.Array:
        """h `[tokens, hidden]`; `recur` maps projections to gated outputs."""
        return self.mlp(self.linear_attn(h, self.input_layernorm, recur), self.post_attention_layernorm)


class MTPHead(nnx.Module):
    """Multi-token prediction: one full-attention layer over [norm(embedding of the next token) ; norm(hidden)].

    Slot t reads token t + 1 and the target's final-normed hidden at t, and predicts token t + 2. Its own output, again
    normed, is the hidden of the next draft.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, recipe: Recipe | None = None):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = projection(2 * size, size, dtype, "mtp", recipe)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.layers = nnx.List([DecoderLayer(config, FULL, dtype, recipe, role="mtp")])
        self.norm = RMSNorm(size, eps)
        if recipe is not None and recipe.draft_head:
            # Some rows of the head, and the ids they stand for: a draft only has to be right often.
            self.draft_head = projection(size, recipe.draft_head, dtype, "head", recipe)
            self.draft_ids = describe((recipe.draft_head,), jnp.int32, "draft_ids")

    def stem(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """Both `[tokens, hidden]`; the embedding comes first in the concatenation."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(jnp.concatenate(parts, axis=-1))

    @property
    def layer(self) -> DecoderLayer:
        return self.layers[0]

    def project(self, x: jax.Array) -> jax.Array:
        """The attention projections of the stem's output: a prompt leaves only their keys and values behind here."""
        return self.layer.self_attn.qkv_proj(x, norm=self.layer.input_layernorm)

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        """The stem's output -> final-normed hidden, `[tokens, hidden]`."""
        return self.norm(self.layer.attention(x, attend))


class TextModel(nnx.Module):
    """Embedding, decoder layers, final norm, output head and, where the checkpoint has one, the MTP head.

    dtype: type of activations, and of matrices that are not quantised. `mtp=False` leaves the MTP head out. recipe: the formats
    of quantised weights; None for weights in `dtype`.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, mtp: bool, recipe: Recipe | None = None):
        if mtp and not config.mtp_layers:
            raise ValueError("config.json: mtp_num_hidden_layers is 0, this model has no MTP head to draft with")
        if recipe is not None and config.tied_embeddings:
            raise ValueError(f"recipe {recipe.name}: needs an output head of its own, this model's is its embedding")
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, recipe)
        self.layers = nnx.List([DecoderLayer(config, kind, dtype, recipe) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tied_embeddings:
            self.lm_head = projection(config.hidden_size, config.vocab_size, dtype, "head", recipe)
        if mtp:
            self.mtp = MTPHead(config, dtype, recipe)
        for name, format in recipe.overrides.items() if recipe else ():
            if name.partition(".")[0] != "mtp" or mtp:
                self._projection(name).reformat(format)

    def _projection(self, name: str) -> QuantisedLinear:
        """The quantised projection called `name`; ValueError if there is none."""
        found: Any = self
        for part in name.split("."):
            found = found[int(part)] if part.isdecimal() and int(part) < len(found) else getattr(found, part, None)
        if not isinstance(found, QuantisedLinear):
            raise ValueError(f"recipe: overrides name {name}, the model has no quantised projection of that name")
        return found

    @property
    def has_mtp(self) -> bool:
        return hasattr(self, "mtp")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 `[tokens]` -> `[tokens, hidden]`."""
        return self.embed_tokens(tokens, self.dtype)

    def run(self, h: jax.Array, attend: AttendAt, recur: RecurAt) -> jax.Array:
        """h `[tokens, hidden]` through all layers -> final-normed hidden `[tokens, hidden]`. attend, recur: what serves or trains
        does with a layer's projections, given its number among the attention layers, or among the delta-rule layers, and its
        mixer: `Attend` and `Recur` with these before their own arguments."""
        attention_at = linear_at = 0
        for layer in self.layers:
            if hasattr(layer, "self_attn"):
                h = layer.attention(h, partial(attend, attention_at, layer.self_attn))
                attention_at += 1
            else:
                h = layer.linear_attention(h, partial(recur, linear_at, layer.linear_attn))
                linear_at += 1
        return self.norm(h)

    def rotary(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """positions int32 `[3, tokens]` -> cos and sin `[tokens, rotary_dim / 2]`."""
        return rotary(positions, self.config, self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final-normed hidden `[tokens, hidden]` -> float32 logits `[tokens, vocab]`, padding rows included."""
        if self.config.tied_embeddings:
            return linear(hidden, self.embed_tokens.weight[...], out_dtype=jnp.float32)
        return self.lm_head(hidden, out_dtype=jnp.float32)

    def candidates(self, hidden: jax.Array, k: int, valid: int) -> tuple[jax.Array, jax.Array]:
        """The k largest of the first `valid` logits `[tokens, k]`, falling, and their ids; for `has_candidates` only."""
        assert isinstance(self.lm_head, QuantisedLinear)
        return head_candidates(hidden, self.lm_head.quantised, k=k, valid=valid)

    @property
    def has_draft_head(self) -> bool:
        """Whether drafts choose from a reduced head."""
        return self.has_mtp and hasattr(self.mtp, "draft_head")

    def reduced_choice(self, hidden: jax.Array) -> jax.Array:
        """The most likely id of each row of final-normed hidden `[tokens, hidden]` in the reduced head, int32 `[tokens]`."""
        assert isinstance(self.mtp.draft_head, QuantisedLinear)
        head = self.mtp.draft_head.quantised
        return self.mtp.draft_ids[...][head_candidates(hidden, head, k=1, valid=head.shape[1])[1][:, 0]]

    def has_candidates(self, rows: int) -> bool:
        """Whether the head can give the best of `rows` rows without writing all their logits."""
        return isinstance(getattr(self, "lm_head", None), QuantisedLinear) and rows <= HEAD_ROWS
