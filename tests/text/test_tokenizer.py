"""Encoding and decoding with the real vocabulary; the stock tokenizer of the same file is the oracle."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from ninfer_jax.text import Tokenizer

SAMPLES = ["हिन्दी", "ก็", "e\u0301", "👩\u200d👩\u200d👧", "a\r\n\r\n  b\t", "毛泽东", "l'été don't", "1234567", "ﬁ Å ≮", ""]
ALPHABET = [*"abAB 12\n\r\t.,'<>|/_éď中🦙ि", "e\u0301", "\u200d", "ก็", "\u00a0", "\ufffd", "\U000f0000"]


def random_text(rng: random.Random, control: list[str], pieces: int = 40) -> str:
    """Characters of many scripts, whole control tokens and cut ones."""

    def piece() -> str:
        kind = rng.randrange(8)
        if kind < 6:
            return rng.choice(ALPHABET)
        token = rng.choice(control)
        return token if kind == 6 else token[: rng.randrange(9)]

    return "".join(piece() for _ in range(rng.randrange(pieces)))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # Encodings that several independent projects publish for these checkpoints.
        ("Hello", [9419]),
        ("你好，世界！", [109266, 3709, 96748, 6115]),
        ("Café — κόσμος 🚀", [34, 2492, 933, 1892, 166265, 203260, 10838, 248, 222]),
        (
            "<|im_start|>user\nWrite a production-quality Python LRU cache with tests and type hints.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            [248045, 846, 198, 7734, 264, 5492, 21408, 12654, 436, 34810, 6297, 440, 6813, 321, 913, 29642, 13, 248046]
            + [198, 248045, 74455, 198, 248068, 271, 248069, 271],
        ),
        ("<|audio_start|><|audio_pad|><|audio_end|>", [248070, 248076, 248071]),
    ],
)
def test_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]):
    assert tokenizer.encode(text, allow_special=True) == ids
    assert tokenizer.decode(ids, skip_special=False) == text


def test_addressable_ids(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 248_077
    assert tokenizer.eos_ids() == (248_046, 248_044)
    assert tokenizer.token_id("<|image_pad|>") == 248_056
    assert tokenizer.token_bytes(tokenizer.token_id("Ġthe")) == b" the"
    assert len(tokenizer.control_tokens) == 33 and len(tokenizer.special_ids) == 21


def test_allowing_control_tokens_gives_the_stock_ids(tokenizer: Tokenizer, stock: tokenizers.Tokenizer):
    rng = random.Random(1)
    control = list(tokenizer.control_tokens)
    for text in SAMPLES + [random_text(rng, control) for _ in range(400)]:
        assert tokenizer.encode(text, allow_special=True) == stock.encode(text, add_special_tokens=False).ids, text


def test_control_spellings_are_text_by_default(tokenizer: Tokenizer):
    rng = random.Random(2)
    control = list(tokenizer.control_tokens)
    for text in SAMPLES + control + [random_text(rng, control) for _ in range(400)]:
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.control_tokens.values()), text
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_plain_spans_protect_some_spellings(tokenizer: Tokenizer):
    text = "a<|im_end|>b<|im_end|>c"
    first = [*tokenizer.encode("a<|im_end|>b"), 248046, *tokenizer.encode("c")]
    assert tokenizer.encode(text, allow_special=True, plain_spans=[(1, 11)]) == first
    assert tokenizer.encode(text, allow_special=True, plain_spans=[(1, 11), (12, 22)]) == tokenizer.encode(text)


def test_decode_is_the_stock_decode(tokenizer: Tokenizer, stock: tokenizers.Tokenizer):
    rng = random.Random(3)
    for _ in range(300):
        # Half of the ids are single bytes, so that broken characters of all kinds occur.
        ids = [rng.choice((rng.randrange(256), rng.randrange(tokenizer.vocab_size))) for _ in range(rng.randrange(30))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == stock.decode(ids, skip_special_tokens=skip), ids


def test_skipping_keeps_the_tags_that_parsers_read(tokenizer: Tokenizer):
    ids = tokenizer.encode("<think>\nx</think><tool_call><|im_end|><|endoftext|>", allow_special=True)
    assert tokenizer.decode(ids) == "<think>\nx</think><tool_call>"


@pytest.mark.parametrize("token", [248_077, 248_319, -1])
def test_ids_out_of_range_are_refused(tokenizer: Tokenizer, token: int):
    with pytest.raises(ValueError, match=rf"token id {token} is out of range: this tokenizer has ids 0\.\.248076"):
        tokenizer.decode([1, token])


def test_bad_text_and_names_are_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"character 1 is a lone surrogate \(U\+D800\)"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(ValueError, match="token '<nope>' is not in the tokenizer's vocabulary"):
        tokenizer.token_id("<nope>")


# The byte-level characters, a and b first.
BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
VOCAB = {character: id_ for id_, character in enumerate(["a", "b", *(c for c in map(chr, BYTES) if c not in "ab")])}


def specification(**changes: object) -> dict:
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": "<e>", "special": True}],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": VOCAB, "merges": []},
    }
    return content | changes


def test_the_longest_control_token_wins():
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 256, "content": "<e>"} | flags, {"id": 257, "content": "<e>a"} | flags]
    content = specification(added_tokens=added)
    stock = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer = Tokenizer(content)
    for text in ("<e>ab", "<e>ba", "b<e><e>aa"):
        assert tokenizer.encode(text, allow_special=True) == stock.encode(text).ids
    assert tokenizer.encode("<e>ab", allow_special=True) == [257, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "has no `model`"),
        (specification(model={"type": "Unigram", "vocab": []}), "only byte-level BPE is supported"),
        (specification(decoder=None), "only byte-level BPE is supported"),
        (specification(model={"type": "BPE", "vocab": {"a": "x"}, "merges": []}), "model.vocab must map"),
        (specification(model={"type": "BPE", "vocab": VOCAB, "merges": ["a qq"]}), "tokenizer.json: .*qq"),
        (specification(added_tokens=[{"content": "<e>"}]), r"added_tokens\[0\] needs an id"),
        (specification(model={"type": "BPE", "vocab": VOCAB | {"ab": 300}, "merges": []}, added_tokens=[]), "id 256 has no token"),
        (
            specification(added_tokens=[{"id": 300, "content": "<e>"}]),
            "added token '<e>' has id 300, the tokenizers library gives it 256",
        ),
        (specification(added_tokens=[{"id": 256, "content": "<e>", "lstrip": True}]), "'<e>' has lstrip=true"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: object, message: str):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_dir(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value) and "\n" not in str(caught.value)
