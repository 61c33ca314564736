"""Haystacks hold what they should where they should, and replies are judged by the number alone."""

from __future__ import annotations

import types
from contextlib import contextmanager

import numpy as np
import pytest

from ninfer_jax.evaluate import needle
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
        (300, 0.0): 1,
        (300, 0.5): 1,
        (300, 1.0): 1,
        (800, 0.0): 1,
        (800, 0.5): 0,
        (800, 1.0): 0,
    }
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


class CopyingDecoder:
    """In place of `ForcedDecoder`: bytes are tokens. After a question it expects the number that `find` gives, digit by digit,
    e^9 times as much as any other byte; where that gives none, after a wrong digit, and elsewhere, all 256 alike."""

    find = staticmethod(lambda text, key: None)

    def __init__(self, engine):
        self.engine = engine

    @contextmanager
    def sequence(self, tokens):
        read = []

        def logits():
            found = np.zeros(260, np.float32)
            text, _, rest = bytes(read).decode().rpartition("\nThe secret number of ")
            key, _, said = rest.partition(" is")
            number = self.find(text, key)
            if number is not None and f" {number}".startswith(said) and len(said) <= len(number):
                found[f" {number}".encode()[len(said)]] = 9
            return found

        def feed(ids):
            read.extend(ids)
            assert len(read) <= tokens
            return logits()

        yield types.SimpleNamespace(prefill=feed, step=lambda token: feed([token]))


class Continuer:
    """Continues a text as CopyingDecoder expects it to go on, greedily."""

    context = 10_000
    tokenizer = types.SimpleNamespace(encode=encode, decode=lambda ids: bytes(ids).decode(), vocab_size=256)

    def generate(self, ids, params):
        assert params.temperature == 0
        said = []
        with CopyingDecoder(self).sequence(10_000) as sequence:
            row = sequence.prefill(ids)
            while row.any() and len(said) < params.max_new_tokens:
                said.append(int(row.argmax()))
                row = sequence.step(said[-1])
        return types.SimpleNamespace(text=bytes(said).decode())


def looked_up(text, key):
    found = text.rpartition(f"secret number of {key} is ")
    return found[2][:5] if found[1] else None


def nearest(text, key):
    return text.rpartition(" is ")[2][:5] if "secret number" in text else None


@pytest.mark.parametrize("find, sees", [(looked_up, (True, True, True)), (nearest, (False, False, True))])
def test_a_model_that_copies_is_found_out(monkeypatch, find, sees):
    """One that looks the key up finds every needle; one that copies the last number it read, only the last needle. A number
    costs nothing where the needle is there, and without it what a blind guess, or a wrong one, costs."""
    monkeypatch.setattr(needle, "ForcedDecoder", CopyingDecoder)
    monkeypatch.setattr(CopyingDecoder, "find", staticmethod(find))
    cells = needle_grid(Continuer(), HAY, [300, 800], DEPTHS, 2, 0, chat=False)
    right, blind = np.log1p(255 * np.exp(-9)), np.log(256)
    assert [(c.length, c.depth) for c in cells] == [(length, depth) for length in (300, 800) for depth in DEPTHS]
    for c, seen in zip(cells, sees * 2, strict=True):
        assert c.found == seen and c.asked == 2
        assert c.answer_nats == pytest.approx(right, abs=1e-4) if seen else c.answer_nats > 4
        if find is looked_up:
            assert c.blind_nats == pytest.approx(blind, abs=1e-4)
        else:
            assert c.blind_nats > 4
