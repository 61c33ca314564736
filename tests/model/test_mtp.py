"""The MTP head inside the programs, against one built in torch from transformers' modules that starts afresh for every draft."""

import numpy as np
import pytest

K = 3
CASES = ["ratio3-8layers", "ratio2-8layers-tied", "ratio3-4layers"]


def check(sequence, reference, history, close):
    """Drafts, keys and values after `history`: all emitted tokens, the last of them not consumed yet."""
    drafts, keys, values = reference.drafts(history, K)
    assert sequence.length == len(history) - 1
    assert sequence.drafts == drafts
    # Slots of consumed tokens, then those of the first K - 1 drafts; the last draft has none.
    k, v = sequence.mtp_pages(len(keys))
    close(k.codes, keys, "MTP keys")
    close(v.codes, values, "MTP values")


@pytest.mark.parametrize("length", [1, 2, 64, 129])
@pytest.mark.parametrize("name", CASES)
def test_first_drafts(name, length, harness, reference, ids, close):
    sequence = harness(name).sequence()
    sequence.prefill(ids[:length], cut=64)
    out = sequence.begin()
    assert out.emitted == 1
    assert out.tokens[0] == reference(name).forward(ids[:length]).logits[-1].argmax()
    check(sequence, reference(name), np.append(ids[:length], out.tokens[0]), close)


def test_a_prompt_leaves_keys_and_values_of_every_known_next_token(harness, expected, reference, ids, close):
    """Also across a chunk border, where the token after the last row is the first of the next chunk."""
    name = CASES[0]
    sequence = harness(name).sequence()
    sequence.prefill(ids[:65])
    sequence.prefill(ids[65:100], cut=20)
    _, _, keys, values = reference(name).mtp(expected(name, 200).hidden[:99], ids[1:100])
    k, v = sequence.mtp_pages(100)
    close(k.codes[:99], keys, "MTP keys")
    close(v.codes[:99], values, "MTP values")
    assert not k.codes[99].any() and not v.codes[99].any()


@pytest.mark.parametrize("length", [2, 62])
@pytest.mark.parametrize("name", CASES)
def test_drafts_after_accepted_and_rejected_ones(name, length, harness, reference, ids, close):
    """Rounds with 0 to 3 right drafts, in an order that follows every number by another; the head must be realigned each time."""
    right = [0, 3, 1, 2, 0, 2, 3, 3, 1]
    sequence = harness(name).sequence()
    sequence.prefill(ids[:length])
    text = reference(name).greedy(ids[:length], sum(right) + len(right) + K + 1)
    assert sequence.begin().tokens[0] == text[length]
    history = text[: length + 1]
    for count in right:
        following = text[len(history) :][:K]
        wrong = (following + 1) % harness(name).config.vocab_size
        drafts = [*following[:count], *wrong[count:]]
        out = sequence.round(drafts=drafts)
        assert (out.emitted, out.accepted) == (count + 1, count)
        history = text[: len(history) + count + 1]
        assert out.tokens[: count + 1].tolist() == history[-count - 1 :].tolist()
        check(sequence, reference(name), history, close)


@pytest.mark.parametrize("name", CASES)
def test_rounds_with_drafts_of_its_own(name, harness, reference, ids, close):
    sequence = harness(name).sequence()
    sequence.prefill(ids[:9])
    history = np.append(ids[:9], sequence.begin().tokens[0])
    for _ in range(6):
        out = sequence.round()
        history = np.append(history, out.tokens[: out.emitted])
        check(sequence, reference(name), history, close)
    assert history.tolist() == reference(name).greedy(ids[:9], len(history) - 9).tolist()
