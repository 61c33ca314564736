"""The draw against independent oracles: transformers' logits processors, the OpenAI penalty formula, exact frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from scipy import stats

from ninfer_jax.decoding import choose
from ninfer_jax.decoding import sampling as module
from ninfer_jax.decoding.sampling import Choice, SamplingState, sampling_struct

SLOTS, VOCAB = (4096, 80)  # more ids than the 64 candidates; one shape nearly everywhere, because the sort compiles slowly


def compiled():
    """`choose` with a cache of its own, so that what a test patches stays in that test."""
    return jax.jit(lambda *arguments: choose(*arguments))


usual = compiled()


def sampling_state(slots: int, **values: object) -> SamplingState:
    """Sampling at temperature 1 with nothing else on; `values` are broadcast over the slots."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "stop_ids": -1}
    return SamplingState(
        **{
            name: jnp.asarray(np.broadcast_to(values.get(name, neutral.get(name, 0)), leaf.shape), leaf.dtype)
            for name, leaf in sampling_struct(slots, VOCAB)._asdict().items()
        }
    )


def widened(row: object, filling: float) -> object:
    """`row` `[..., ids]` with `filling` behind it up to VOCAB; what is no array stays as it is."""
    row = np.asarray(row, np.float32)
    return row if row.ndim == 0 else np.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, VOCAB - row.shape[-1])], constant_values=filling)


def choose_row(logits: np.ndarray, run=usual, **values: object) -> Choice:
    """One row a slot, `[ids]` shared or `[4096, ids]`, at token index 0 to 4095 of one seed. Results `[4096, ...]`.

    Ids beyond the row are padding whose logits would win.
    """
    for name in ("bias", "counts", "in_prompt"):
        values[name] = widened(values.get(name, 0), 1)
    state = sampling_state(SLOTS, **{"emitted": np.arange(SLOTS)} | values)
    rows = jnp.asarray(np.broadcast_to(widened(logits, 99.0), (SLOTS, VOCAB)))[:, None]
    chosen = run(rows, state, jnp.zeros((SLOTS, 0), jnp.int32), logits.shape[-1])
    return jax.tree.map(lambda x: np.asarray(x)[:, 0], chosen)


@pytest.fixture(scope="module")
def on_grid():
    """Distribution `[ids]` of the drawn token, to 1 / 4096: the uniform numbers are the midpoints of an even grid."""
    run = compiled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_uniform", lambda key, index: (index.astype(jnp.float32) + 0.5) / SLOTS)
        choose_row(np.zeros(4, np.float32), run=run)  # traced and compiled here

    def frequencies(logits: np.ndarray, **values: object) -> np.ndarray:
        return np.bincount(choose_row(logits, run=run, **values).token, minlength=len(logits)) / SLOTS

    return frequencies


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """float64 probabilities after transformers' warpers, in the order in which its `generate` applies them."""
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [transformers.TopPLogitsWarper(top_p), transformers.MinPLogitsWarper(min_p)]
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.7, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.8, 0, 0.5, 0.0),
    (0.8, 0, 0.0, 0.0),
    (1.3, 0, 1.0, 0.1),
    (1.0, 7, 0.8, 0.15),
    (2.0, 0, 0.9, 1.0),
    (100.0, 0, 0.9, 0.0),
]


def test_truncation_equals_transformers(on_grid) -> None:
    rng = np.random.default_rng(0)
    for temperature, top_k, top_p, min_p in SETTINGS:
        for vocab in (12, VOCAB):
            logits = (rng.normal(size=vocab) * 1.2).astype(np.float32)
            expected = warped(logits, temperature, top_k, top_p, min_p)
            got = on_grid(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            np.testing.assert_allclose(got, expected, atol=1.5 / SLOTS)
            assert not got[expected == 0].any()
            assert got[expected > 1.5 / SLOTS].all()


def test_ties(on_grid) -> None:
    """Equal logits on the kept side share their probability; at a cut exactly top_k are kept, the lowest ids first,
    where transformers keeps all that tie with the last."""
    logits = np.array([1, 2, 2, 0, 2, 1, 1, 0], np.float32)
    np.testing.assert_allclose(on_grid(logits, top_k=3), warped(logits, 1.0, 3, 1.0, 0.0), atol=1.5 / SLOTS)
    np.testing.assert_allclose(on_grid(logits), warped(logits, 1.0, 0, 1.0, 0.0), atol=1.5 / SLOTS)
    np.testing.assert_allclose(on_grid(logits, min_p=0.3), warped(logits, 1.0, 0, 1.0, 0.3), atol=1.5 / SLOTS)
    np.testing.assert_allclose(on_grid(logits, top_k=2), [0, 0.5, 0.5, 0, 0, 0, 0, 0], atol=1.5 / SLOTS)
    assert set(np.flatnonzero(warped(logits, 1.0, 2, 1.0, 0.0))) == {1, 2, 4}
    # Half of the mass is in three tokens; a nucleus of 0.3 needs two of them.
    equal = np.zeros(8, np.float32)
    np.testing.assert_allclose(on_grid(equal, top_p=0.3), [1 / 3] * 3 + [0] * 5, atol=1.5 / SLOTS)


def test_repetition_penalty_equals_transformers(on_grid) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=16).astype(np.float32)
    prompt, generated = np.array([0, 3, 3, 9]), np.array([2, 9, 11, 11])
    for penalty in (0.5, 1.0, 1.3, 4.0):
        ids = torch.tensor(np.concatenate([prompt, generated]))[None]
        scores = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.tensor(logits)[None])
        in_prompt = np.isin(np.arange(16), prompt)
        got = on_grid(logits, repetition=penalty, in_prompt=in_prompt, counts=np.bincount(generated, minlength=16))
        np.testing.assert_allclose(got, torch.softmax(scores.double(), -1)[0].numpy(), atol=1.5 / SLOTS)


def recounted(logits: np.ndarray, generated: list[int], presence: float, frequency: float, bias: dict[int, float]) -> np.ndarray:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], c counting what was generated (the OpenAI formula)."""
    out = logits.astype(np.float64)
    for token in range(len(out)):
        count = generated.count(token)
        out[token] += bias.get(token, 0.0) - count * frequency - (presence if count else 0.0)
    return out


def softmax64(logits: np.ndarray) -> np.ndarray:
    e = np.exp(np.float64(logits) - np.max(logits))
    return e / e.sum()


def test_presence_frequency_and_bias(on_grid) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=16).astype(np.float32)
    generated, bias = [1, 4, 4, 4, 15], {0: 1.5, 4: 2.0, 7: -1e4}
    for presence, frequency in ((0.7, 0.0), (0.0, 0.4), (-1.0, 0.3), (100.0, -100.0)):
        expected = softmax64(recounted(logits, generated, presence, frequency, bias))
        got = on_grid(
            logits,
            presence=presence,
            frequency=frequency,
            counts=np.bincount(generated, minlength=16),
            bias=[bias.get(t, 0.0) for t in range(16)],
            in_prompt=rng.random(16) < 0.5,
        )
        np.testing.assert_allclose(got, expected, atol=1.5 / SLOTS)


def test_a_row_counts_the_drafts_before_it() -> None:
    """Greedily, with penalties as large as the differences between logits, so that every count decides."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        logits = rng.normal(size=(3, 4, 6)).astype(np.float32) * 0.7
        drafts = rng.integers(0, 6, (3, 3))
        history = [rng.integers(0, 6, n).tolist() for n in (0, 2, 5)]
        counts = [np.bincount(np.array(h, int), minlength=6) for h in history]
        state = sampling_state(3, temperature=0.0, presence=0.5, frequency=0.9, counts=widened(counts, 0))
        got = np.asarray(usual(jnp.asarray(widened(logits, 99.0)), state, jnp.asarray(drafts, jnp.int32), 6).token)
        for slot in range(3):
            for row in range(4):
                seen = history[slot] + drafts[slot, :row].tolist()
                assert got[slot, row] == recounted(logits[slot, row], seen, 0.5, 0.9, {}).argmax()


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", SETTINGS[:3] + SETTINGS[6:8])
def test_frequencies_of_real_draws(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square over (seed, index) pairs: many indices of four seeds, then one index of many seeds."""
    logits = (np.random.default_rng(4).normal(size=50) * 1.2).astype(np.float32)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    n = np.arange(SLOTS)
    draws = [choose_row(logits, key=[seed, seed], **settings).token for seed in range(4)]
    draws += [choose_row(logits, key=np.stack([n, n * 0 + high], axis=1), emitted=5, **settings).token for high in range(4)]
    expected = warped(logits, temperature, top_k, top_p, min_p)
    kept = expected > 0
    for half in (draws[:4], draws[4:]):
        counts = np.bincount(np.concatenate(half), minlength=50)
        assert not counts[~kept].any()
        assert stats.chisquare(counts[kept], expected[kept] / expected[kept].sum() * counts.sum()).pvalue > 1e-3


def test_padded_ids_are_never_drawn() -> None:
    for temperature in (0.0, 1.0, 100.0):
        # The bias is on the padding too, whose logits are 99.
        chosen = choose_row(np.zeros(30, np.float32), temperature=temperature, bias=np.zeros(30), top_logprobs=True)
        assert chosen.token.max() < 30 and chosen.top_tokens.max() < 30
        np.testing.assert_allclose(chosen.logprob, -np.log(30), rtol=1e-6)


def test_few_candidates_and_the_full_sort_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (np.random.default_rng(5).normal(size=VOCAB) * 2).round(1).astype(np.float32)  # rounded: full of ties
    settings = {"temperature": 0.9, "top_p": 0.97, "min_p": 0.001}
    few = choose_row(logits, top_k=64, **settings).token
    assert len(set(few)) > 20
    # One slot without top_k makes everybody sort; nobody else's token may change for it.
    mixed = choose_row(logits, top_k=np.where(np.arange(SLOTS) == 7, 0, 64), **settings).token
    np.testing.assert_array_equal(np.delete(few, 7), np.delete(mixed, 7))
    monkeypatch.setattr(module, "CANDIDATES", 1)
    np.testing.assert_array_equal(few, choose_row(logits, top_k=64, run=compiled(), **settings).token)


def test_temperature_zero_takes_the_lowest_of_the_most_likely() -> None:
    logits = np.array([1, 3, 3, 2, 3, 0], np.float32)
    assert (choose_row(logits, temperature=0.0).token == 1).all()
    # After the penalty 1 and 3 tie at 2; sampling slots beside it change nothing.
    greedy = np.arange(SLOTS) % 2 == 0
    tokens = choose_row(logits, temperature=np.where(greedy, 0, 1), presence=1.0, counts=[0, 1, 4, 0, 1, 0]).token
    assert (tokens[greedy] == 1).all() and len(set(tokens[~greedy])) == 6
    assert (choose_row(logits, temperature=0.0, frequency=1.0, counts=[0, 2, 1, 0, 1, 0]).token == 2).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1.2e-38, 1e-40])
def test_tiny_temperatures_take_the_most_likely(temperature: float) -> None:
    for offset in (0.0, 500.0, -500.0):
        logits = (np.random.default_rng(6).normal(size=VOCAB) * 5 + offset).astype(np.float32)
        assert (choose_row(logits, temperature=np.float32(temperature)).token == logits.argmax()).all()


@pytest.mark.parametrize("top_k", [0, 5])
def test_only_one_possible_token(top_k: int) -> None:
    logits = np.full(70, -np.inf, np.float32)
    logits[33] = -3.0
    chosen = choose_row(logits, top_k=top_k, repetition=1.5, presence=2.0, frequency=1.0, counts=3)
    assert (chosen.token == 33).all() and (chosen.logprob == 0).all()


def test_logprobs_are_of_the_raw_distribution() -> None:
    rng = np.random.default_rng(7)
    logits = (rng.normal(size=(3, 4, 50)) * 4).astype(np.float32)
    settings = {"temperature": 0.3, "top_k": 4, "presence": 1.0, "counts": 1, "bias": rng.normal(size=VOCAB)}
    rows, drafts = jnp.asarray(widened(logits, 99.0)), jnp.zeros((3, 3), jnp.int32)
    chosen = jax.tree.map(np.asarray, usual(rows, sampling_state(3, top_logprobs=[True, False, False], **settings), drafts, 50))
    exact = logits - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen.logprob, np.take_along_axis(exact, chosen.token[..., None], -1)[..., 0], rtol=2e-6, atol=2e-6)
    order = np.argsort(-exact, axis=-1)[..., :20]
    np.testing.assert_array_equal(chosen.top_tokens[0], order[0])
    np.testing.assert_allclose(chosen.top_logprobs[0], np.take_along_axis(exact, order, -1)[0], rtol=2e-6, atol=2e-6)
    nobody = usual(rows, sampling_state(3, **settings), drafts, 50)
    assert not np.asarray(nobody.top_tokens).any() and not np.asarray(nobody.top_logprobs).any()


def test_a_draw_is_decided_by_seed_and_index_alone() -> None:
    """The n-th token of a seed comes out the same from every slot and row, whatever the other slots ask for."""
    rng = np.random.default_rng(8)
    key, length = [123, 456], 40
    logits = (rng.normal(size=(length, VOCAB)) * 2).astype(np.float32)
    alone = choose_row(np.resize(logits, (SLOTS, VOCAB)), key=key).token[:length]
    assert len(set(alone)) > 15
    for slot in range(3):
        mine = np.arange(3) == slot
        for first in range(length - 3):
            # Row r of this slot is token first + r; the other slots hold something else.
            rows = rng.normal(size=(3, 4, VOCAB)).astype(np.float32)
            rows[slot] = logits[first : first + 4]
            state = sampling_state(
                3,
                key=np.where(mine[:, None], key, rng.integers(0, 2**31, (3, 2))),
                emitted=np.where(mine, first, rng.integers(0, 99, 3)),
                temperature=np.where(mine, 1, rng.choice([0, 0.7], 3)),
                top_k=np.where(mine, 0, rng.choice([0, 5, 70], 3)),
                presence=np.where(mine, 0, rng.choice([0, 1], 3)),
            )
            drafts = jnp.asarray(rng.integers(0, VOCAB, (3, 3)), jnp.int32)
            tokens = np.asarray(usual(jnp.asarray(rows), state, drafts, VOCAB).token)
            np.testing.assert_array_equal(tokens[slot], alone[first : first + 4])


def test_both_halves_of_the_seed_count() -> None:
    logits = np.zeros(VOCAB, np.float32)
    drawn = [choose_row(logits, key=key).token for key in ([123, 456], [123, 457], [124, 456], [456, 123])]
    for i in range(4):
        for j in range(i):
            # Independent draws of 80 equally likely tokens agree about 51 times in 4096.
            assert (drawn[i] == drawn[j]).sum() < 100
