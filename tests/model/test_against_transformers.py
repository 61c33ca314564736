"""Prefill and decode against transformers, float32: hidden, logits, recurrent and convolution states, keys and values.

One compilation of each program serves all lengths and all ways to cut a prompt.
"""

import numpy as np
import pytest
from torch_reference import CASES

LENGTHS = [1, 2, 3, 63, 64, 65, 127, 129, 200]


def check_state(sequence, theirs, close, where):
    pairs = {
        "recurrent": (sequence.recurrent, theirs.recurrent),
        "convolution": (sequence.conv, theirs.conv),
        "keys": ([k.codes for k, _ in sequence.pages(sequence.length)], theirs.keys),
        "values": ([v.codes for _, v in sequence.pages(sequence.length)], theirs.values),
    }
    for what, (ours, expected) in pairs.items():
        for at, (a, b) in enumerate(zip(ours, expected, strict=True)):
            close(a, b, f"{where}: {what} {at}")


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_one_chunk(name, harness, expected, ids, close):
    engine = harness(name)
    for length in LENGTHS:
        theirs = expected(name, length)
        sequence = engine.sequence()
        hidden = sequence.prefill(ids[:length])
        close(hidden, theirs.hidden, f"{length} tokens: hidden")
        close(engine.logits(hidden), theirs.logits, f"{length} tokens: logits")
        check_state(sequence, theirs, close, f"{length} tokens")


@pytest.mark.parametrize("length, cut", [(65, 1), (129, 5), (200, 63), (200, 64), (200, 65), (129, 128)])
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_pieces(name, length, cut, harness, expected, ids, close):
    theirs = expected(name, length)
    sequence = harness(name).sequence()
    hidden = sequence.prefill(ids[:length], cut=cut)
    close(hidden, theirs.hidden, "hidden")
    check_state(sequence, theirs, close, f"pieces of {cut}")


@pytest.mark.parametrize("name", CASES)
def test_token_by_token(name, harness, expected, ids, close):
    """From an empty slot through decode rounds; the 20 most likely tokens of every step, and the states at every length."""
    wanted = log_softmax(expected(name, len(ids)).logits)
    sequence = harness(name).sequence()
    for at, token in enumerate(ids):
        out = sequence.feed(token)
        assert (out.emitted, sequence.length) == (1, at + 1)
        assert out.tokens[0] == wanted[at].argmax()
        assert len(set(out.top_tokens[0])) == 20
        close(out.top_logprobs[0], wanted[at][out.top_tokens[0]], f"token {at}: log-probabilities")
        close(out.top_logprobs[0], np.sort(wanted[at])[:-21:-1], f"token {at}: the most likely")
        if at + 1 in LENGTHS:
            check_state(sequence, expected(name, at + 1), close, f"{at + 1} tokens")


@pytest.mark.parametrize("length", [2, 65, 129])
@pytest.mark.parametrize("name", ["ratio3-8layers", "ratio1-4layers-tied", "ratio3-4layers"])
def test_prefill_and_decode_leave_the_same_state(name, length, harness, ids, close):
    whole, stepped = harness(name).sequence(), harness(name).sequence()
    whole.prefill(ids[:length])
    stepped.prefill(ids[:1])
    for token in ids[1:length]:
        stepped.feed(token)
    assert whole.length == stepped.length == length
    for what in ("recurrent", "conv"):
        for a, b in zip(getattr(stepped, what), getattr(whole, what), strict=True):
            close(a, b, what)
    for a, b in zip(stepped.pages(length), whole.pages(length), strict=True):
        close(a[0].codes, b[0].codes, "keys")
        close(a[1].codes, b[1].codes, "values")


def log_softmax(x):
    x = np.asarray(x, np.float64)
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
