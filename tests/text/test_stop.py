"""Stop strings over piece borders, against a character-by-character search."""

import random

import pytest

from ninfer_jax.text import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    deltas = []
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        deltas.append(emit)
        if stopped:
            break
    deltas.append(matcher.flush())
    return "".join(deltas), matcher.matched, deltas


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["own fox"], ["The quick br", "own", " fox"], "The quick br", "own fox"),
        (["\nUser:"], ["\nUser", ":"], "", "\nUser:"),
        (["Alice:"], [" Alice", "!"], " Alice!", None),
        (["assistant"], ["ple", "as"], "pleas", None),
        (["ab", "abc"], ["xabc"], "x", "ab"),
        (["abc", "ab"], ["xa", "bc"], "x", "ab"),
        (["fox", "own fox"], ["br", "own", " fox"], "br", "own fox"),
        (["STOP"], ["one two ST", "OP three four"], "one two ", "STOP"),
        (["Hello"], ["Hello", " world"], "", "Hello"),
        (["aab"], ["aa", "a", "ab"], "aa", "aab"),
        ([], ["any", "thing"], "anything", None),
    ],
)
def test_cases(stops: list[str], pieces: list[str], text: str, matched: str | None):
    assert run(stops, pieces)[:2] == (text, matched)


def test_only_what_could_become_a_stop_is_held_back():
    assert run(["own fox"], ["The quick br", "o", "x"])[2] == ["The quick br", "", "ox", ""]
    assert run(["\n\n"], ["a\n", "b"])[2] == ["a", "\nb", ""]


def test_nothing_follows_a_match():
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def by_character(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_random_pieces_agree_with_a_search_by_character():
    rng = random.Random(5)
    for _ in range(3000):
        text = "".join(rng.choices("ab\n", k=rng.randrange(14)))
        stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 4))) for _ in range(rng.randrange(4))]
        pieces, rest = [], text
        while rest:
            cut = rng.randint(0, 4)
            pieces.append(rest[:cut])
            rest = rest[cut:]
        shown, matched, deltas = run(stops, pieces)
        assert (shown, matched) == by_character(stops, text), (stops, pieces)
        # Held back is the longest end that begins a stop string, no more.
        fed = ""
        for count, (piece, _) in enumerate(zip(pieces, deltas[:-1], strict=False), 1):
            fed += piece
            if matched is None:
                tails = [n for n in range(len(fed) + 1) if any(s.startswith(fed[len(fed) - n :]) for s in stops)]
                assert len("".join(deltas[:count])) == len(fed) - max(tails, default=0)


@pytest.mark.parametrize(
    ("stops", "message"), [("abc", "stop: must be a list of strings, not str"), (["a", ""], r"stop\[1\]"), (["a", 3], r"stop\[1\]")]
)
def test_bad_stops_are_named(stops: object, message: str):
    with pytest.raises(ValueError, match=message):
        StopMatcher(stops)
