"""Whole sequences without a cache, differentiable: what training runs, through the same modules as serving."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ninfer_jax.model.attention import Heads
from ninfer_jax.model.gdn import GatedDeltaNet, Mixed
from ninfer_jax.model.text import TextModel
from pallas_kernels.delta_rule import chunked_delta_rule


def forward_sequences(model: TextModel, tokens: jax.Array) -> jax.Array:
    """tokens int32 `[batch, tokens]`, tokens a multiple of 64 -> final-normed hidden `[batch, tokens, hidden]`."""
    batch, length = tokens.shape
    cos, sin = model.rotary(_positions(batch, length))
    h = model.embed(tokens.reshape(-1))
    for layer in model.layers:
        if hasattr(layer, "self_attn"):
            h = layer.attention(h, cos, sin, _causal_attention(batch))
        else:
            h = layer.linear_attention(h, _whole_recurrence(layer.linear_attn, batch))
    return model.norm(h).reshape(batch, length, -1)


def mtp_sequences(model: TextModel, hidden: jax.Array, next_tokens: jax.Array) -> jax.Array:
    """One MTP step over whole sequences: hidden `[batch, tokens, hidden]` at t and the token at t + 1 (int32
    `[batch, tokens]`) -> the MTP head's final-normed hidden, whose logits predict the token at t + 2."""
    batch, length, size = hidden.shape
    cos, sin = model.rotary(_positions(batch, length))
    x = model.mtp.stem(model.embed(next_tokens.reshape(-1)), hidden.reshape(-1, size))
    return model.mtp(x, cos, sin, _causal_attention(batch)).reshape(batch, length, size)


def _positions(batch: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tile(jnp.arange(length), batch), (3, batch * length))


def _causal_attention(batch: int) -> Callable[[Heads], jax.Array]:
    def attend(heads: Heads) -> jax.Array:
        q, k, v = (x.reshape(batch, -1, *x.shape[1:]) for x in (heads.q, heads.k, heads.v))
        length, kv_heads, size = q.shape[1], k.shape[2], q.shape[3]
        q = q.reshape(batch, length, kv_heads, -1, size)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * size**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(batch * length, -1, size)

    return attend


def _whole_recurrence(mixer: GatedDeltaNet, batch: int) -> Callable[[Mixed], jax.Array]:
    def recur(mixed: Mixed) -> jax.Array:
        raw, g, beta = (x.reshape(batch, -1, *x.shape[1:]) for x in (mixed.raw, mixed.g, mixed.beta))
        width = mixer.conv1d.weight[...].shape[-1]
        q, k, v = mixer.convolve(jnp.pad(raw, ((0, 0), (width - 1, 0), (0, 0))))
        _, value_heads, key_dim, value_dim = mixer.heads
        start = jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32)
        out, _ = jax.vmap(chunked_delta_rule)(start, q, k, v, g, beta)
        return out.reshape(-1, value_heads, value_dim)

    return recur
