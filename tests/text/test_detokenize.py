"""Streaming text equals blocking text, whatever the grouping of the ids."""

import random
from collections.abc import Iterator

import pytest

from ninfer_jax.text import IncrementalDecoder, Tokenizer

TEXT = "🦙 ďábelské 中文 👩\u200d👩\u200d👧 é"


class ByBytes:
    """A tokenizer whose ids are bytes."""

    def decode_bytes(self, ids: list[int], skip_special: bool = True) -> bytes:
        return bytes(ids)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def groups(ids: list[int], size: int, rng: random.Random) -> Iterator[list[int]]:
    """Consecutive groups of `size` ids; size 0: random sizes, empty groups included."""
    done = 0
    while done < len(ids):
        step = size or rng.randrange(5)
        yield ids[done : done + step]
        done += step


@pytest.mark.parametrize("size", [1, 2, 3, 4, 0])
def test_every_grouping_gives_the_same_text(tokenizer: Tokenizer, size: int):
    ids = tokenizer.encode(TEXT)
    decoder = IncrementalDecoder(tokenizer)
    deltas = [decoder.push(group) for group in groups(ids, size, random.Random(size))]
    assert "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    assert decoder.flush() == ""


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([token]) for token in tokenizer.encode("🦙")] == ["", "", "🦙"]


def test_a_cut_character_appears_only_at_flush(tokenizer: Tokenizer):
    ids = tokenizer.encode(TEXT)
    for cut in range(len(ids)):
        decoder = IncrementalDecoder(tokenizer)
        pushed = "".join(decoder.push([token]) for token in ids[:cut])
        assert TEXT.startswith(pushed)
        assert pushed + decoder.flush() == tokenizer.decode(ids[:cut])


@pytest.mark.parametrize("skip_special", [True, False])
def test_random_bytes_and_tokens(tokenizer: Tokenizer, skip_special: bool):
    rng = random.Random(4)
    for round_ in range(200):
        # Byte tokens (ids below 256) in any order give every kind of invalid UTF-8.
        ids = [rng.choice((rng.randrange(256), rng.randrange(tokenizer.vocab_size), 248046)) for _ in range(25)]
        decoder = IncrementalDecoder(tokenizer, skip_special)
        text = "".join(decoder.push(group) for group in groups(ids, round_ % 4, rng)) + decoder.flush()
        assert text == tokenizer.decode(ids, skip_special), ids


def test_invalid_bytes_appear_once_proven(tokenizer: Tokenizer):
    first, second, letter = (tokenizer.encode("🦙")[0], *tokenizer.encode("€a")[-1:], tokenizer.encode("x")[0])
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push([first]) == ""
    assert decoder.push([letter]) == "\ufffdx"
    assert decoder.push([second]) == tokenizer.decode([second])


@pytest.mark.parametrize("text", [*TEXT, "a\u00e9", "\u20ac\u20ac", "\U0001f999" * 2, "e\u0301x"])
def test_a_prompt_that_ends_inside_a_character(text: str):
    """The character comes whole with the answer that completes it, whatever the grouping."""
    raw, tokenizer = text.encode(), ByBytes()
    for cut in range(len(raw)):
        whole = len(raw[:cut].decode(errors="ignore"))  # characters that the prompt has already
        for size in (1, 2, 7):
            decoder = IncrementalDecoder(tokenizer, after=list(raw[:cut]))
            pushed = "".join(decoder.push(group) for group in groups(list(raw[cut:]), size, random.Random(0)))
            assert pushed + decoder.flush() == text[whole:], (cut, size)


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (b"a\xf0\x9f", b"xyz", "xyz"),  # the prompt's bytes leave nothing behind
        (b"a\xf0\x9f", "\u00e9".encode(), "\u00e9"),
        (b"a\xf0\x9f", b"\xa6x", "\ufffdx"),  # the answer's own broken byte
        (b"a\xf0\x9f", b"\xa6\x99\xff!", "\U0001f999\ufffd!"),
        (b"a\xf0\x9f", b"\xa6", "\ufffd"),  # cut off at the end
        (b"a\xf0\x9f\xa6", b"", ""),
        (b"\x99\xa6", b"\xa6x", "\ufffdx"),
        (b"\xff\xc3", b"\xa9", "\u00e9"),
        (b"\xe2\x82", b"\xac\xac", "\u20ac\ufffd"),
        (b"abc", b"\x82", "\ufffd"),
    ],
)
def test_an_answer_that_does_not_go_on_with_the_prompts_character(prompt: bytes, answer: bytes, expected: str):
    for size in (1, 2, 7):
        decoder = IncrementalDecoder(ByBytes(), after=list(prompt))
        assert "".join(decoder.push(group) for group in groups(list(answer), size, random.Random(0))) + decoder.flush() == expected
        assert decoder.push(list(b"\xc3\xa9")) == "\u00e9"  # used again, without the prompt


def test_the_prompts_end_is_found_across_tokens(tokenizer: Tokenizer):
    ids = tokenizer.encode("so \U0001f999")
    decoder = IncrementalDecoder(tokenizer, after=ids[:-1])
    assert decoder.push(ids[-1:]) == "\U0001f999"
    assert IncrementalDecoder(tokenizer, after=[*ids[:-1], 248046]).push(ids[-1:]) == "\ufffd"  # a turn ends in between


def test_a_bad_id_leaves_the_decoder_usable(tokenizer: Tokenizer):
    first, *rest = tokenizer.encode("🦙")
    decoder = IncrementalDecoder(tokenizer)
    decoder.push([first])
    with pytest.raises(ValueError, match="token id 999999 is out of range"):
        decoder.push([999_999])
    assert decoder.push(rest) == "🦙"
