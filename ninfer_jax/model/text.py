"""The text tower and its MTP head, as Flax modules whose parameters are described before they are read."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.config import FULL, ModelConfig
from ninfer_jax.model.attention import Attention, Heads
from ninfer_jax.model.gdn import GatedDeltaNet, Mixed
from ninfer_jax.model.layers import MLP, Embedding, Linear, RMSNorm
from ninfer_jax.model.rope import rotary
from pallas_kernels.matmul import linear


class DecoderLayer(nnx.Module):
    """h += mixer(norm(h)); h += mlp(norm(h)). One of `self_attn` and `linear_attn` exists."""

    def __init__(self, config: ModelConfig, kind: str, dtype: jnp.dtype, role: str | None = None):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if kind == FULL:
            self.self_attn = Attention(config, dtype, role or "attention")
        else:
            self.linear_attn = GatedDeltaNet(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype, role or "mlp")

    def attention(
        self, h: jax.Array, cos: jax.Array, sin: jax.Array, attend: Callable[[Heads], jax.Array]
    ) -> jax.Array:
        """h `[tokens, hidden]`; `attend` maps heads to the attended values, float32 `[tokens, query_heads, head_dim]`."""
        heads = self.self_attn.project(self.input_layernorm(h), cos, sin)
        return self._feed_forward(h + self.self_attn.output(attend(heads), heads.gate))

    def linear_attention(self, h: jax.Array, recur: Callable[[Mixed], jax.Array]) -> jax.Array:
        """h `[tokens, hidden]`; `recur` maps projections to outputs, float32 `[tokens, value_heads, value_dim]`."""
        mixed = self.linear_attn.project(self.input_layernorm(h))
        return self._feed_forward(h + self.linear_attn.output(recur(mixed), mixed.z))

    def _feed_forward(self, h: jax.Array) -> jax.Array:
        return h + self.mlp(self.post_attention_layernorm(h))


class MTPHead(nnx.Module):
    """Multi-token prediction: one full-attention layer over [norm(embedding of the next token) ; norm(hidden)].

    Slot t reads token t + 1 and the target's final-normed hidden at t, and predicts token t + 2. Its own output, again
    normed, is the hidden of the next draft.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(2 * size, size, dtype, "mtp")
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.layers = nnx.List([DecoderLayer(config, FULL, dtype, role="mtp")])
        self.norm = RMSNorm(size, eps)

    def stem(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """Both `[tokens, hidden]`; the embedding comes first in the concatenation."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(jnp.concatenate(parts, axis=-1))

    def keys_values(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """k and v of the stem's output: all that a prompt leaves behind in this layer."""
        layer = self.layers[0]
        return layer.self_attn.keys_values(layer.input_layernorm(x), cos, sin)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Callable[[Heads], jax.Array]) -> jax.Array:
        """The stem's output -> final-normed hidden, `[tokens, hidden]`."""
        return self.norm(self.layers[0].attention(x, cos, sin, attend))


class TextModel(nnx.Module):
    """Embedding, decoder layers, final norm, output head and, where the checkpoint has one, the MTP head.

    dtype: type of matrices and activations. `mtp=False` leaves the MTP head out.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, mtp: bool):
        if mtp and not config.mtp_layers:
            raise ValueError("config.json: mtp_num_hidden_layers is 0, this model has no MTP head to draft with")
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, kind, dtype) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tied_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, "head")
        if mtp:
            self.mtp = MTPHead(config, dtype)

    @property
    def has_mtp(self) -> bool:
        return hasattr(self, "mtp")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 `[tokens]` -> `[tokens, hidden]`."""
        return self.embed_tokens(tokens, self.dtype)

    def rotary(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """positions int32 `[3, tokens]` -> cos and sin for `Attention.project`."""
        return rotary(positions, self.config, self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final-normed hidden `[tokens, hidden]` -> float32 logits `[tokens, vocab]`, padding rows included."""
        if self.config.tied_embeddings:
            return linear(hidden, self.embed_tokens.weight[...], out_dtype=jnp.float32)
        return self.lm_head(hidden, out_dtype=jnp.float32)
