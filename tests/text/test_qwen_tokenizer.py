"""The rebuilt tokenizer files against the published hashes, sizes and encodings."""

import hashlib
import json
from pathlib import Path

import pytest

from ninfer_jax.checkpoints import qwen_tokenizer
from ninfer_jax.text import Tokenizer


def test_files_are_the_published_ones(tokenizer_dir: Path):
    def digest(name: str) -> str:
        return hashlib.sha256((tokenizer_dir / name).read_bytes()).hexdigest()

    assert digest("vocab.json") == "ce99b4cb2983d118806ce0a8b777a35b093e2000a503ebde25853284c9dfa003"
    assert digest("merges.txt") == "a9d356d7bdf1ef4949e3e748e95b8e10ad9d4e2e838eddc38a0a7b6b94d1db8d"


@pytest.mark.parametrize(("variant", "first"), [("3.6", 512 - 26), ("3.8", 512 - 33)])
def test_mini_has_the_same_shape(tmp_path: Path, variant: str, first: int):
    tokenizer = Tokenizer.from_dir(qwen_tokenizer.build(tmp_path, variant, mini=512).parent)
    assert tokenizer.vocab_size == 512
    assert tokenizer.token_id("<|endoftext|>") == first
    assert tokenizer.token_id("<think>") == first + 24
    text = "Zwölf Boxkämpfer, 中文 🦙\n\n12"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_flags(tokenizer_dir: Path):
    added = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    assert [token["id"] for token in added] == list(range(248044, 248077))
    kept = {token["content"] for token in added if not token["special"]}
    assert kept == {
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    }


@pytest.mark.parametrize(
    "place", ["", "a\0b", __file__, f"{__file__}/below", "x" * 5000], ids=["empty", "NUL", "file", "below", "long"]
)
def test_a_place_that_is_none(place: str):
    with pytest.raises(ValueError, match=r"\A.{1,400}\Z"):
        qwen_tokenizer.build(place)


def test_bad_requests_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="variant '4' is unknown: allowed are 3.5, 3.6, 3.8"):
        qwen_tokenizer.build(tmp_path, "4")
    with pytest.raises(ValueError, match="mini=200 is too small"):
        qwen_tokenizer.build(tmp_path, mini=200)
    with pytest.raises(ValueError, match="mini=300000 is larger than the vocabulary of 248044"):
        qwen_tokenizer.build(tmp_path, mini=300_000)
    damaged = tmp_path / "x.tiktoken"
    damaged.write_text("IQ== 0\nIQ==\n")
    with pytest.raises(ValueError, match="x.tiktoken: line 2 is not"):
        qwen_tokenizer.read_ranks(damaged)


def test_merges_skip_unreachable_tokens():
    # "abcd" reduces to ab + cd; "bcd" reduces to b + cd; "abc" to ab + c; "zxy" has no pieces at all.
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"d": 3, b"x": 4, b"y": 5, b"z": 6}
    ranks |= {b"ab": 7, b"cd": 8, b"abc": 9, b"bcd": 10, b"abcd": 11, b"zxy": 12}
    assert qwen_tokenizer.merges_of(ranks) == [(b"a", b"b"), (b"c", b"d"), (b"ab", b"c"), (b"b", b"cd"), (b"ab", b"cd")]
