"""The delta rule over a prefill chunk, in blocks of 64 tokens (WY form), float32.

Within a block with G = cumsum(g) and D_ij = exp(G_i - G_j) for i >= j (Yang et al. 2024, section 3.3):
    A = strict_lower((beta K) K^T * D),  T = (I + A)^-1,  U = T (beta V),  W = T (beta K * e^G)
    V' = U - W S;  O = (Q e^G) S + lower(Q K^T * D) V';  S <- e^{G_end} S + (K e^{G_end - G})^T V'
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64
_EXACT = jax.lax.Precision.HIGHEST


def chunked_delta_rule(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One sequence's tokens through the delta rule.

    state `[value_heads, key_dim, value_dim]`; q, k `[tokens, key_heads, key_dim]`; v `[tokens, value_heads,
    value_dim]`; g (log-decay, <= 0) and beta `[tokens, value_heads]`; all float32, tokens a multiple of 64. A token
    with g = 0 and beta = 0 leaves the state exactly as it is: that is how padding is passed. Returns the outputs
    `[tokens, value_heads, value_dim]` and the new state. Cutting a sequence at multiples of 64 changes no bit.
    """
    tokens, key_heads, _ = q.shape
    value_heads = v.shape[1]
    if tokens % CHUNK:
        raise ValueError(f"chunked_delta_rule: {tokens} tokens, a multiple of {CHUNK} is needed")
    share = value_heads // key_heads

    def blocks(x: jax.Array) -> jax.Array:  # [tokens, heads, ...] -> [blocks, heads, 64, ...]
        return jnp.swapaxes(x.reshape(tokens // CHUNK, CHUNK, *x.shape[1:]), 1, 2)

    q, k, v, g, beta = blocks(q), blocks(k), blocks(v), blocks(g), blocks(beta)
    total = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    # K K^T and Q K^T once a key head, shared by its value heads.
    kk = jnp.repeat(_mm("nhid,nhjd->nhij", k, k), share, axis=1)
    qk = jnp.repeat(_mm("nhid,nhjd->nhij", q, k), share, axis=1) * decay
    k, q = jnp.repeat(k, share, axis=1), jnp.repeat(q, share, axis=1)
    a = jnp.where(jnp.tril(lower, -1), kk * decay * beta[..., None], 0.0)
    t = unit_lower_inverse(a)
    grown = jnp.exp(total)[..., None]
    u = _mm("nhij,nhjd->nhid", t, beta[..., None] * v)
    w = _mm("nhij,nhjd->nhid", t, beta[..., None] * k * grown)
    q_in = q * grown
    k_out = k * jnp.exp(total[..., -1:] - total)[..., None]
    shrink = jnp.exp(total[..., -1])[..., None, None]

    def block(s: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u_n, w_n, q_n, k_n, qk_n, shrink_n = x
        fresh = u_n - _mm("hid,hdv->hiv", w_n, s)
        out = _mm("hid,hdv->hiv", q_n, s) + _mm("hij,hjv->hiv", qk_n, fresh)
        return shrink_n * s + _mm("hid,hiv->hdv", k_n, fresh), out

    state, out = jax.lax.scan(block, state, (u, w, q_in, k_out, qk, shrink))
    return jnp.swapaxes(out, 1, 2).reshape(tokens, value_heads, -1), state


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower triangular a `[..., 64, 64]`, by products only.

    Inverses of the diagonal blocks are doubled in size six times: [[P, 0], [C, Q]]^-1 = [[P', 0], [-Q' C P', Q']].
    The shorter product (I - a)(I + a^2)(I + a^4)... is not used: for repeated keys the powers of a reach 1e18
    while the inverse stays near 1, and float32 keeps nothing of it.
    """
    size = a.shape[-1]
    row, col = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    half = 1
    while half < size:
        # Lower-left quarter of every diagonal block of 2 * half.
        corner = (row // (2 * half) == col // (2 * half)) & (row % (2 * half) >= half) & (col % (2 * half) < half)
        c = jnp.where(corner, a, 0.0)
        inverse = inverse - (c if half == 1 else _mm("...ij,...jk->...ik", inverse, _mm("...ij,...jk->...ik", c, inverse)))
        half *= 2
    return inverse


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    # d(I + a)^-1 = -(I + a)^-1 da (I + a)^-1: two products instead of the transpose of all twelve.
    return (-_mm("...ji,...jk->...ik", inverse, _mm("...ij,...kj->...ik", grad, inverse)),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _mm(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=_EXACT)
