"""The delta rule and its inputs against float64 NumPy, and the exactness that taking drafts back rests on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import (
    Transitions,
    causal_conv,
    chunked_delta_rule,
    decay_and_beta,
    decode_delta_rule,
    fold_transitions,
    l2_normalise,
    split_qkv,
)
from pallas_kernels.elementary import opaque_zero

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 32, 24

run_chunked = jax.jit(chunked_delta_rule)


@jax.jit
def decode_rows(state, q, transitions, lengths):
    return decode_delta_rule(state, q, transitions, opaque_zero(lengths))


@jax.jit
def run_fold(state, transitions, accepted):
    return fold_transitions(state, transitions, accepted, opaque_zero(accepted))


def run_decode(state, q, transitions):
    return decode_rows(state, q, transitions, jnp.ones(1, jnp.int32))  # an argument: the compiler must not know the zero


def recurrence(state, q, k, v, g, beta):
    """float64, token by token and head by head: S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q."""
    state, q, k, v, g, beta = (np.array(x, np.float64) for x in (state, q, k, v, g, beta))
    out = np.zeros(v.shape)
    for t in range(len(v)):
        for head in range(v.shape[1]):
            key = head // (v.shape[1] // k.shape[1])
            s = state[head] * np.exp(g[t, head])
            u = beta[t, head] * (v[t, head] - s.T @ k[t, key])
            state[head] = s + np.outer(k[t, key], u)
            out[t, head] = state[head].T @ q[t, key]
    return out, state


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs(tokens: int, seed: int = 0) -> list[np.ndarray]:
    """state, q, k, v, g, beta as the model makes them: unit keys, decays from near 1 to near 0."""
    rng = np.random.default_rng(seed)
    drawn = [
        rng.normal(size=(VALUE_HEADS, KEY_DIM, VALUE_DIM)),
        unit(rng.normal(size=(tokens, KEY_HEADS, KEY_DIM))) / np.sqrt(KEY_DIM),
        unit(rng.normal(size=(tokens, KEY_HEADS, KEY_DIM))),
        rng.normal(size=(tokens, VALUE_HEADS, VALUE_DIM)),
        -np.exp(rng.normal(size=(tokens, VALUE_HEADS)) * 2 - 2),
        rng.random((tokens, VALUE_HEADS)),
    ]
    return [x.astype(np.float32) for x in drawn]


def token_by_token(state, q, k, v, g, beta):
    """The same through the decode path, four tokens a call as a verify pass takes them."""
    state, outputs = jnp.asarray(state)[None], []
    for at in range(0, len(q), 4):
        rows = slice(at, at + 4)
        transitions = Transitions(*(jnp.asarray(x[rows])[None] for x in (k, v, np.exp(g), beta)))
        outputs.append(run_decode(state, jnp.asarray(q[rows])[None], transitions)[0])
        state = run_fold(state, transitions, jnp.full(1, 4))
    return np.concatenate(outputs), np.asarray(state)[0]


def near(got: np.ndarray, exact: np.ndarray, tolerance: float = 1e-5) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - exact).max() <= tolerance * np.abs(exact).max() + 1e-30


EXTREMES = {
    "as the model makes them": {},
    "no decay": {"g": 0.0},
    "all forgotten": {"g": -50.0},
    "decay one way, then the other": {"g": np.where(np.arange(192) % 2, -50.0, 0.0)[:, None]},
    "nothing written": {"beta": 0.0},
    "all overwritten": {"beta": 1.0},
    "overwritten without decay": {"beta": 1.0, "g": 0.0},
}


@pytest.mark.parametrize("path", [run_chunked, token_by_token])
@pytest.mark.parametrize("case", EXTREMES)
def test_equals_the_float64_recurrence(case: str, path) -> None:
    state, q, k, v, g, beta = inputs(192)
    g = np.broadcast_to(np.float32(EXTREMES[case].get("g", g)), g.shape)
    beta = np.broadcast_to(np.float32(EXTREMES[case].get("beta", beta)), beta.shape)
    exact_out, exact_state = recurrence(state, q, k, v, g, beta)
    out, new = (np.asarray(x) for x in path(state, q, k, v, g, beta))
    near(out, exact_out)
    near(new, exact_state)


@pytest.mark.parametrize("path", [run_chunked, token_by_token])
def test_tiny_and_repeated_keys(path) -> None:
    """Keys shrunk by 1e-12 write next to nothing; one key again and again is the worst case for the block inverse."""
    state, q, k, v, g, beta = inputs(128, seed=1)
    tiny = k * np.float32(1e-12)
    repeated = np.broadcast_to(k[:1], k.shape)
    for keys in (tiny, repeated):
        # No decay and full strength: nothing damps an error.
        exact_out, exact_state = recurrence(state, q, keys, v, g * 0, beta * 0 + 1)
        out, new = (np.asarray(x) for x in path(state, q, keys, v, g * 0, beta * 0 + 1))
        near(out, exact_out)
        near(new, exact_state)


@pytest.mark.bits
def test_padding_leaves_the_state_as_it_is() -> None:
    """Tokens with g = beta = 0: whatever their q, k and v, not one bit of the state changes."""
    state, q, k, v, g, beta = inputs(128, seed=2)
    _, new = run_chunked(state, q, k, v, g * 0, beta * 0)
    np.testing.assert_array_equal(new, state)
    valid = 77
    g[valid:], beta[valid:] = 0, 0
    _, exact = recurrence(state, q[:valid], k[:valid], v[:valid], g[:valid], beta[:valid])
    _, first = run_chunked(state, q, k, v, g, beta)
    near(np.asarray(first), exact)
    q[valid:], k[valid:], v[valid:] = 3e3, -7e3, 5e3
    _, second = run_chunked(state, q, k, v, g, beta)
    np.testing.assert_array_equal(first, second)


@pytest.mark.bits
def test_cutting_a_prompt_at_blocks_changes_no_bit() -> None:
    """As the engine cuts one: each piece is padded to the same number of tokens and goes through the same program."""
    state, *rest = inputs(192, seed=3)
    whole_out, whole = run_chunked(state, *rest)
    out, new = [], state
    for at in (0, 64, 128):
        piece = [np.concatenate([x[at : at + 64], np.zeros_like(x[64:])]) for x in rest]
        part, new = run_chunked(new, *piece)
        out.append(part[:64])
    np.testing.assert_array_equal(np.concatenate(out), whole_out)
    np.testing.assert_array_equal(new, whole)


def test_chunks_are_multiples_of_64() -> None:
    with pytest.raises(ValueError, match="65 tokens, a multiple of 64"):
        chunked_delta_rule(*(jnp.asarray(x) for x in inputs(65)))


def batch(slots: int, rows: int) -> tuple[np.ndarray, np.ndarray, Transitions]:
    """state, q and transitions of several slots."""
    parts = [np.stack(x) for x in zip(*(inputs(rows, seed=10 + s) for s in range(slots)), strict=True)]
    state, q, k, v, g, beta = parts
    return state, q, Transitions(k, v, np.exp(g), beta)


@pytest.mark.bits
def test_folding_equals_stepping() -> None:
    """m rows in one fold, or one a fold m times: the same bits, each slot with its own m. One program does both."""
    slots, rows = 5, 6
    state, _, transitions = batch(slots, rows)
    stepped = [state]
    for row in range(rows):
        one = Transitions(*(np.roll(x, -row, axis=1) for x in transitions))
        stepped.append(np.asarray(run_fold(stepped[-1], one, jnp.ones(slots, jnp.int32))))
    for accepted in ([0] * 5, [1] * 5, [6] * 5, [0, 1, 3, 5, 6], [6, 0, 0, 0, 2], [4, 4, 0, 1, 0]):
        folded = np.asarray(run_fold(state, transitions, jnp.array(accepted, jnp.int32)))
        for slot, m in enumerate(accepted):
            np.testing.assert_array_equal(folded[slot], stepped[m][slot])
    assert not np.array_equal(stepped[6], stepped[5])


@pytest.mark.bits
def test_a_row_depends_on_the_rows_before_it_only() -> None:
    """Row r of a six-row pass is row 0 after folding r rows, and garbage behind it changes no bit. A pass of one row is
    another program: each may be as far from the exact result as the float64 recurrence is allowed to be, see `near`."""
    slots, rows = 3, 6
    state, q, transitions = batch(slots, rows)
    together = np.asarray(run_decode(state, q, transitions))
    for r in range(rows):
        folded = run_fold(state, transitions, jnp.full(slots, r))
        alone = run_decode(folded, q[:, r : r + 1], Transitions(*(x[:, r : r + 1] for x in transitions)))
        near(np.asarray(alone)[:, 0], together[:, r], 2e-5)
    spoiled = Transitions(*(np.concatenate([x[:, :3], x[:, 3:] * 9 - 1], axis=1) for x in transitions))
    np.testing.assert_array_equal(np.asarray(run_decode(state, q, spoiled))[:, :3], together[:, :3])


@pytest.mark.parametrize("width", [2, 4])
def test_causal_conv(width: int) -> None:
    rng = np.random.default_rng(4)
    tokens, channels = 9, 7
    window = rng.normal(size=(2, width - 1 + tokens, channels)).astype(np.float32)
    weight = rng.normal(size=(channels, 1, width)).astype(np.float32)
    exact = np.zeros((2, tokens, channels))
    for b in range(2):
        for t in range(tokens):
            for c in range(channels):
                # The last tap meets the current token, which stands width - 1 places into the window.
                total = sum(float(weight[c, 0, i]) * float(window[b, t + i, c]) for i in range(width))
                exact[b, t, c] = total / (1 + np.exp(-total))
    np.testing.assert_allclose(causal_conv(jnp.asarray(window), jnp.asarray(weight)), exact, rtol=2e-5, atol=2e-6)
    rounded = jnp.asarray(window, jnp.bfloat16)
    got = causal_conv(rounded, jnp.asarray(weight))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, causal_conv(rounded.astype(jnp.float32), jnp.asarray(weight)))


def test_l2_normalise() -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(4, 32)) * scale for scale in (1e3, 1.0, 1e-3, 1e-6)] + [np.zeros((1, 32))]).astype(
        np.float32
    )
    exact = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(l2_normalise(jnp.asarray(x)), exact, rtol=1e-6)
    assert l2_normalise(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


def test_split_qkv() -> None:
    rng = np.random.default_rng(6)
    keys = KEY_HEADS * KEY_DIM
    mixed = rng.normal(size=(3, 2 * keys + VALUE_HEADS * VALUE_DIM)).astype(np.float32)
    q, k, v = split_qkv(jnp.asarray(mixed), KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    for head in range(KEY_HEADS):
        columns = slice(head * KEY_DIM, (head + 1) * KEY_DIM)
        np.testing.assert_allclose(q[:, head], unit(np.float64(mixed[:, :keys][:, columns])) / np.sqrt(KEY_DIM), rtol=1e-5)
        np.testing.assert_allclose(k[:, head], unit(np.float64(mixed[:, keys:][:, columns])), rtol=1e-5)
    for head in range(VALUE_HEADS):
        at = 2 * keys + head * VALUE_DIM
        np.testing.assert_array_equal(v[:, head], mixed[:, at : at + VALUE_DIM])


def test_gates() -> None:
    rng = np.random.default_rng(7)
    a, b = (np.concatenate([rng.normal(size=(5, 4)) * 3, np.full((1, 4), s)]).astype(np.float32) for s in (-80.0, 80.0))
    a_log, dt_bias = (rng.normal(size=4).astype(np.float32) for _ in range(2))
    g, beta = decay_and_beta(*(jnp.asarray(x) for x in (a, b, a_log, dt_bias)))
    exact_g = -np.exp(np.float64(a_log)) * np.log1p(np.exp(np.float64(a) + dt_bias))
    np.testing.assert_allclose(g, exact_g, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-np.float64(b))), rtol=1e-5)
    assert (np.asarray(g) <= 0).all()
    g, beta = decay_and_beta(*(jnp.asarray(x, jnp.bfloat16) for x in (a, b)), jnp.asarray(a_log), jnp.asarray(dt_bias))
    assert g.dtype == beta.dtype == jnp.float32
