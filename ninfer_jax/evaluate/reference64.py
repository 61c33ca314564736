"""The whole model in NumPy float64, token after token in the recurrence: no chunks, no pages, no codec, no JAX.

It takes the engine's own weights, quantised ones as the numbers that they stand for, so what differs from it is arithmetic
alone. 8 bytes a parameter; for small models.
"""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from ninfer_jax.config import ModelConfig
from ninfer_jax.model import TextModel
from ninfer_jax.model.layers import QuantisedLinear
from pallas_kernels.matmul import dequantise


class Float64Model:
    """Reads a text from its beginning, a stretch at a time. `states`: recurrent states float64 `[value_heads, key_dim,
    value_dim]`, one a GDN layer, after what has been read."""

    def __init__(self, model: TextModel):
        """ValueError where the weights do not fit this machine's memory."""
        config = model.config
        matrix = 12 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
        needed = 8 * (matrix * config.layers + 2 * config.vocab_size * config.hidden_size)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory // 2:
            takes = f"the float64 reference takes about {needed >> 30} GiB, half of this machine's memory is {memory >> 31} GiB"
            raise ValueError(f"{takes}; use --reference decode")
        self.config = config
        self._embed = np.asarray(model.embed_tokens(jnp.arange(config.vocab_size), jnp.dtype(jnp.float32))).astype(np.float64)
        self._norm = _f64(model.norm.weight)
        head: Any = getattr(model, "lm_head", None)  # absent where it is the embedding
        self._head = self._embed if head is None else _matrix(head)
        self._layers = [_Layer(layer, config) for layer in model.layers]
        self._length = 0

    @property
    def states(self) -> list[np.ndarray]:
        return [layer.state for layer in self._layers if layer.state is not None]

    def read(self, tokens: list[int]) -> np.ndarray:
        """Append tokens; the last one's logits, float64 `[vocab rows]`."""
        h = self._embed[tokens]
        cos, sin = _rotary(self._length + np.arange(len(tokens)), self.config)
        for layer in self._layers:
            h = layer(h, cos, sin)
        self._length += len(tokens)
        return self._head @ _rms(h[-1], self._norm, self.config.rms_norm_eps)


class _Layer:
    def __init__(self, layer, config: ModelConfig):
        self.config, self.state = config, None
        self.norms = _f64(layer.input_layernorm.weight), _f64(layer.post_attention_layernorm.weight)
        self.gate_up, self.down = _matrix(layer.mlp.gate_up_proj), _matrix(layer.mlp.down_proj)
        self.attends = hasattr(layer, "self_attn")
        if self.attends:
            own = layer.self_attn
            self.inputs, self.out = _matrix(own.qkv_proj), _matrix(own.o_proj)
            self.qk_norms = _f64(own.q_norm.weight), _f64(own.k_norm.weight)
            self.keys = self.values = np.zeros((config.kv_heads, 0, config.head_dim))
        else:
            own = layer.linear_attn
            self.inputs, self.gates, self.out = (_matrix(p) for p in (own.in_proj, own.gate_proj, own.out_proj))
            self.taps, self.a_log, self.dt_bias = _f64(own.conv1d.weight)[:, 0], _f64(own.A_log), _f64(own.dt_bias)
            self.out_norm = _f64(own.norm.weight)
            self.state = np.zeros((config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim))
            self.window = np.zeros((config.conv_width - 1, config.conv_channels))

    def __call__(self, h: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        eps = self.config.rms_norm_eps
        x = _rms(h, self.norms[0], eps)
        h = h + (self._attention(x, cos, sin) if self.attends else self._recurrence(x)) @ self.out.T
        gate, up = np.split(_rms(h, self.norms[1], eps) @ self.gate_up.T, 2, axis=-1)
        return h + (_silu(gate) * up) @ self.down.T

    def _attention(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        c, count = self.config, len(x)
        queries, keys = 2 * c.query_heads * c.head_dim, c.kv_heads * c.head_dim
        q, k, v = np.split(x @ self.inputs.T, [queries, queries + keys], axis=-1)
        q, gate = np.split(q.reshape(count, c.query_heads, 2 * c.head_dim), 2, axis=-1)
        q = _turn(_rms(q, self.qk_norms[0], c.rms_norm_eps), cos, sin)
        k = _turn(_rms(k.reshape(count, c.kv_heads, -1), self.qk_norms[1], c.rms_norm_eps), cos, sin)
        self.keys = np.concatenate([self.keys, k.transpose(1, 0, 2)], axis=1)
        self.values = np.concatenate([self.values, v.reshape(count, c.kv_heads, -1).transpose(1, 0, 2)], axis=1)
        total, share = self.keys.shape[1], c.query_heads // c.kv_heads
        later = np.arange(total) > (total - count + np.arange(count))[:, None]
        out = np.empty((count, c.query_heads, c.head_dim))
        for head in range(c.query_heads):
            scores = q[:, head] @ self.keys[head // share].T / np.sqrt(c.head_dim)
            scores[later] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights @ self.values[head // share] / weights.sum(axis=1, keepdims=True)
        return (out / (1 + np.exp(-gate))).reshape(count, -1)

    def _recurrence(self, x: np.ndarray) -> np.ndarray:
        c, count = self.config, len(x)
        raw, z = np.split(x @ self.inputs.T, [c.conv_channels], axis=-1)
        a, b = np.split(x @ self.gates.T, 2, axis=-1)
        window = np.concatenate([self.window, raw])
        self.window = window[count:]
        mixed = _silu(np.sum([window[tap : tap + count] * self.taps[:, tap] for tap in range(c.conv_width)], axis=0))
        size = c.gdn_key_heads * c.gdn_key_dim
        q, k = (mixed[:, n * size : (n + 1) * size].reshape(count, c.gdn_key_heads, -1) for n in (0, 1))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        q, k = (np.repeat(y, c.gdn_value_heads // c.gdn_key_heads, axis=1) for y in (q / np.sqrt(c.gdn_key_dim), k))
        v = mixed[:, 2 * size :].reshape(count, c.gdn_value_heads, -1)
        decay = np.exp(-np.exp(self.a_log) * np.logaddexp(0, a + self.dt_bias))
        beta, out = 1 / (1 + np.exp(-b)), np.empty_like(v)
        for t in range(count):
            state = self.state * decay[t][:, None, None]
            change = beta[t][:, None] * (v[t] - (k[t][:, None] @ state)[:, 0])
            self.state = state + k[t][:, :, None] * change[:, None]
            out[t] = (q[t][:, None] @ self.state)[:, 0]
        out = out / np.sqrt((out * out).mean(-1, keepdims=True) + c.rms_norm_eps) * self.out_norm
        return out.reshape(count, -1) * _silu(z)


def _matrix(projection: Any) -> np.ndarray:
    """`[out, in]`."""
    if isinstance(projection, QuantisedLinear):
        return np.asarray(dequantise(projection.quantised)).T.astype(np.float64)
    return _f64(projection.weight)


def _f64(parameter) -> np.ndarray:
    return np.asarray(parameter[...]).astype(np.float64)


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + weight)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _rotary(positions: np.ndarray, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    frequency = float(config.rope_theta) ** (-2.0 * np.arange(config.rotary_dim // 2) / config.rotary_dim)
    angles = positions[:, None, None] * frequency
    return np.cos(angles), np.sin(angles)


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)
