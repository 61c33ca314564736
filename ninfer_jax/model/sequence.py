"""Whole sequences without a cache, differentiable: what training runs, through the same modules as serving."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.model.attention import Attend, Attention
from ninfer_jax.model.gdn import GatedDeltaNet, Recur
from ninfer_jax.model.text import TextModel
from pallas_kernels.delta_prefill.reference import delta_prefill


def forward_sequences(model: TextModel, tokens: jax.Array) -> jax.Array:
    """tokens int32 `[batch, tokens]`, tokens a multiple of 64 -> final-normed hidden `[batch, tokens, hidden]`."""
    batch, length = tokens.shape
    cos, sin = model.rotary(_positions(batch, length))
    hidden = model.run(
        model.embed(tokens.reshape(-1)),
        lambda _, mixer, projected: _causal_attention(mixer, cos, sin, batch)(projected),
        lambda _, mixer, projected, ab: _whole_recurrence(mixer, batch)(projected, ab),
    )
    return hidden.reshape(batch, length, -1)


def mtp_sequences(model: TextModel, hidden: jax.Array, next_tokens: jax.Array) -> jax.Array:
    """One MTP step over whole sequences: hidden `[batch, tokens, hidden]` at t and the token at t + 1 (int32
    `[batch, tokens]`) -> the MTP head's final-normed hidden, whose logits predict the token at t + 2."""
    batch, length, size = hidden.shape
    cos, sin = model.rotary(_positions(batch, length))
    x = model.mtp.stem(model.embed(next_tokens.reshape(-1)), hidden.reshape(-1, size))
    attend = _causal_attention(model.mtp.layer.self_attn, cos, sin, batch)
    return model.mtp(x, attend).reshape(batch, length, size)


def _positions(batch: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tile(jnp.arange(length), batch), (3, batch * length))


def _causal_attention(layer: Attention, cos: jax.Array, sin: jax.Array, batch: int) -> Attend:
    def attend(projected: jax.Array) -> jax.Array:
        heads = layer.heads(projected, cos, sin)
        q, k, v = (x.reshape(batch, -1, *x.shape[1:]) for x in (heads.q, heads.k, heads.v))
        length, kv_heads, size = q.shape[1], k.shape[2], q.shape[3]
        q = q.reshape(batch, length, kv_heads, -1, size)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * size**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, preferred_element_type=jnp.float32)
        gated = out.reshape(heads.gate.shape).astype(heads.gate.dtype) * jax.nn.sigmoid(heads.gate)
        return gated.reshape(batch * length, -1)

    return attend


def _whole_recurrence(mixer: GatedDeltaNet, batch: int) -> Recur:
    _, value_heads, key_dim, value_dim = mixer.heads
    constants = mixer.constants

    def recur(projected: jax.Array, ab: jax.Array) -> jax.Array:
        channels, _, width = constants.taps.shape
        conv = jnp.zeros((1, width - 1, channels), projected.dtype)
        start = jnp.zeros((1, value_heads, key_dim, value_dim), jnp.float32)

        def one(projected: jax.Array, ab: jax.Array) -> jax.Array:
            length = projected.shape[0]
            out, _, _ = delta_prefill(projected, ab, conv, start, *constants, jnp.int32(0), jnp.int32(length), eps=mixer.eps)
            return out

        out = jax.vmap(one)(projected.reshape(batch, -1, projected.shape[1]), ab.reshape(batch, -1, ab.shape[1]))
        return out.reshape(projected.shape[0], -1)

    return recur
