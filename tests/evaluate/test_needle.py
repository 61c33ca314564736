"""Haystacks hold what they should where they should, and replies are judged by the number alone."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ninfer_jax.evaluate.forced import ForcedDecoder
from ninfer_jax.evaluate.needle import answer_nats, haystack, needle_grid, question

DEPTHS = (0.0, 0.5, 1.0)


def encode(text: str) -> list[int]:
    return list(text.encode())


HAY = encode("so it went on and on. " * 200)


def test_every_needle_is_where_its_depth_says():
    made = haystack(encode, HAY, 600, DEPTHS, seed=3)
    assert len(made.ids) == 600
    text = bytes(made.ids).decode()
    rest = 600 - sum(end - start for start, end in made.spans)
    for at, (key, number) in enumerate(zip(made.keys, made.numbers, strict=True)):
        start, end = made.spans[at]
        assert bytes(made.ids[start:end]).decode() == f"\nThe secret number of {key} is {number}.\n"
        before = start - sum(e - s for s, e in made.spans if s < start)
        assert before == round(DEPTHS[at] * rest)
        assert text.count(number) == 1 and number not in question(key)
        assert number not in bytes(made.without(at)).decode() and len(made.without(at)) == 600 - (end - start)
    assert len(set(made.keys)) == len(set(made.numbers)) == 3


def test_the_order_of_depths_does_not_matter():
    made, other = (haystack(encode, HAY, 600, depths, seed=3) for depths in ((0.0, 0.5), (0.5, 0.0)))
    assert [s for s, _ in made.spans] == [s for s, _ in reversed(other.spans)]


def test_seeds_change_what_is_hidden():
    one, two, again = (haystack(encode, HAY, 600, DEPTHS, seed) for seed in (1, 2, 1))
    assert one == again and one.numbers != two.numbers


@pytest.mark.parametrize(
    ("length", "message"), [(90, "has no room for 3 needles"), (9000, "the text has 4400 tokens, length 9000 needs")]
)
def test_lengths_that_do_not_work(length, message):
    with pytest.raises(ValueError, match=message):
        haystack(encode, HAY, length, DEPTHS, 0)


class Reader:
    """Answers with the number that stands after the key in the text, but only within its first `sight` bytes."""

    context = 10_000

    def __init__(self, sight: int):
        self.sight, self.asked = sight, []
        self.tokenizer = types.SimpleNamespace(encode=encode, decode=lambda ids: bytes(ids).decode())

    def generate(self, messages, params, enable_thinking):
        text = messages[0]["content"]
        self.asked.append(text)
        sentence = text.rpartition("secret number of ")[2].split("?")[0]
        seen = text[: self.sight].partition(f"secret number of {sentence} is ")[2]
        return types.SimpleNamespace(text=f"It is {seen[:5]}." if seen else "No idea.")


def test_the_grid_says_what_was_found():
    told = []
    reader = Reader(sight=400)
    cells = needle_grid(reader, HAY, [300, 800], DEPTHS, 2, 0, True, lambda done, total: told.append((done, total)))
    assert {(c.length, c.depth): c.found for c in cells} == {
        (300, 0.0): 1, (300, 0.5): 1, (300, 1.0): 1, (800, 0.0): 1, (800, 0.5): 0, (800, 1.0): 0,
    }  # fmt: skip
    assert all(c.asked == 2 and c.answer_nats is None for c in cells)
    assert told[-1] == (12, 12) and len(reader.asked) == 12


def test_answer_nats_are_those_of_scoring(engine, ids):
    decoder = ForcedDecoder(engine)
    asked, answer = (engine.tokenizer.encode(text) for text in (question("Troy"), " 40312"))
    logits = engine.score(ids + asked + answer)[:, : engine.tokenizer.vocab_size].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    first = len(ids) + len(asked) - 1
    expected = -np.mean([logp[first + n, token] for n, token in enumerate(answer)])
    assert answer_nats(decoder, ids, "Troy", "40312") == pytest.approx(expected, abs=2e-3)


def test_a_grid_without_messages(engine, ids):
    text = ids * 3
    cells = needle_grid(engine, text, [128], (0.0, 1.0), 1, 0, chat=False)
    assert [c.depth for c in cells] == [0.0, 1.0]
    assert all(c.found in (0, 1) and c.answer_nats != c.blind_nats for c in cells)
    with pytest.raises(ValueError, match="context holds 512 tokens, length 500 needs 564"):
        needle_grid(engine, text, [500], (0.0,), 1, 0, chat=False)
