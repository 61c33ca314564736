"""Settings of a checkpoint's tokenizer files: the ids are those of `transformers`' AutoTokenizer on the same directory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from ninfer_jax.checkpoints import qwen_tokenizer, tiny_path
from ninfer_jax.text import Tokenizer
from ninfer_jax.text.tokenizer_file import PATTERN

# Qwen2's pattern, which some requantised repositories ship: combining marks end a word.
OLD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What a combining mark is attached to, composed and not, and characters whose NFC is another one (ANGSTROM, KELVIN).
SPELLED = ["<think>", "<think>\u0338", "<é>", "<e\u0301>", "<e\u0316\u0301>", "<é>\u0316", "\u212a", "K", "Å", "A\u030a", "\u212b"]
ALPHABET = [*"abK eÅ\n<>", "é", "e\u0301", "\u0338", "\u0316", "<|im_end|>", "<tool_call>", "हि", "\u1100\u1161", *SPELLED]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes the bundled model's tokenizer and config with changes applied in place to their parsed files."""

    def write(
        specification: Callable[[dict], object] = lambda _: None,
        config: Callable[[dict], object] = lambda _: None,
        model: Callable[[dict], object] = lambda _: None,
    ) -> Path:
        for name, change in (("tokenizer.json", specification), ("tokenizer_config.json", config), ("config.json", model)):
            content = json.loads((tiny_path() / name).read_text("utf-8"))
            change(content)
            (tmp_path / name).write_text(json.dumps(content), "utf-8")
        return tmp_path

    return write


def texts(seed: int, count: int = 300) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(ALPHABET) for _ in range(rng.randrange(24))) for _ in range(count)]


def assert_same_ids(folder: Path, cases: list[str], decoded: bool = True) -> Tokenizer:
    """decoded: compare decoded text too. The library decodes added tokens as if they were spelled in byte-level characters,
    so that `<é>` comes out as a broken byte: of those only ids are compared."""
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)
    for text in cases:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, allow_special=True) == ids, text
        assert not decoded or ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    return ours


TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": 8,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
}
BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [992], "tokens": ["<|im_start|>"]}},
}


@pytest.mark.parametrize(
    "change", [{"truncation": TRUNCATION}, {"padding": PADDING}, {"post_processor": BOS_FIRST}], ids=lambda c: next(iter(c))
)
def test_what_transformers_sets_back_changes_no_id(checkpoint: Callable[..., Path], change: dict) -> None:
    tokenizer = assert_same_ids(checkpoint(lambda s: s.update(change)), [*texts(1), "A long prompt. " * 80])
    assert len(tokenizer.encode("A long prompt. " * 80)) > 300
    assert not tokenizer.notes


def test_dropout_is_for_training(checkpoint: Callable[..., Path]) -> None:
    expected = Tokenizer.from_dir(tiny_path()).encode("Who is there? " * 20)
    folder = checkpoint(lambda s: s["model"].update(dropout=0.5))
    assert Tokenizer.from_dir(folder).encode("Who is there? " * 20) == expected


def pattern(text: str) -> Callable[[dict], object]:
    return lambda s: s["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": text})


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("pre_tokenizer", pattern(OLD_PATTERN)),
        ("pre_tokenizer", lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
        ("normalizer", lambda s: s.update(normalizer=None)),
        ("normalizer", lambda s: s.update(normalizer={"type": "NFKC"})),
        ("model.ignore_merges", lambda s: s["model"].update(ignore_merges=True)),
    ],
    ids=["old pattern", "prefix space", "no normaliser", "NFKC", "ignore_merges"],
)
@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "replaced"),
    [
        ("qwen3_5", "Qwen2Tokenizer", True),
        ("qwen3_5_text", "Qwen3_5Tokenizer", True),
        ("qwen3_5_text", None, True),
        ("qwen3_5_text", "PreTrainedTokenizerFast", False),
    ],
)
def test_parts_that_define_the_tokenizer(checkpoint, part, change, model_type, tokenizer_class, replaced):
    """`transformers` builds them anew for the family's class and takes the file's for the general one; a note says which."""

    def config(content: dict) -> None:
        content.pop("tokenizer_class")
        if tokenizer_class:
            content["tokenizer_class"] = tokenizer_class

    def model(content: dict) -> None:
        if model_type == "qwen3_5":
            text = dict(content)
            content.clear()
            content.update(model_type="qwen3_5", text_config=text)

    # Both see the words that the change splits otherwise: a mark inside, an ANGSTROM, a ligature.
    folder = checkpoint(change, config, model)
    (note,) = assert_same_ids(folder, ["हिन्दी ก็ ﬁ \u212b Hello there", *texts(2, 60)]).notes
    assert part in note and ("replaced" in note) == replaced


def test_the_pattern_is_the_familys():
    assert PATTERN == PRETOKENIZE_REGEX == qwen_tokenizer.PRE_TOKENIZER


def flagged(*contents: str, **flags: bool) -> Callable[[dict], object]:
    """Flags the added tokens `contents`; those that are not there are added with them."""

    def change(specification: dict) -> None:
        tokens = {token["content"]: token for token in specification["added_tokens"]}
        for content in contents:
            if content not in tokens:
                own = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
                tokens[content] = {"id": 991 + len(tokens), "content": content} | own
                specification["added_tokens"].append(tokens[content])
            tokens[content].update(flags)

    return change


@pytest.mark.parametrize("normalizer", [{"type": "NFC"}, None], ids=["NFC", "none"])
def test_normalised_added_tokens(checkpoint: Callable[..., Path], normalizer: dict | None) -> None:
    def change(specification: dict) -> None:
        flagged("<think>", "<é>", "\u212a", "<|im_end|>", "b<", "b<|im", "e\u0301K", normalized=True)(specification)
        specification["normalizer"] = normalizer

    tokenizer = assert_same_ids(
        checkpoint(change), [*texts(3, 800), "हि" * 50 + "<e\u0301>" + "हि" * 50, "b<|im_end|>b<b<|i"], False
    )
    for text in texts(4, 200):  # as plain text none of them is a token
        assert not set(tokenizer.encode(text)) & set(tokenizer.control_tokens.values())


def test_spans_of_plain_text_hold_for_normalised_tokens(checkpoint: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_dir(checkpoint(flagged("<é>", normalized=True)))
    token, text = tokenizer.control_tokens["<é>"], "हि<e\u0301>x<é>y<e\u0301>"
    spans = tokenizer.control.spellings(text)
    assert [text[a:b] for a, b in spans] == ["<e\u0301>", "<é>", "<e\u0301>"]
    assert tokenizer.encode(text, allow_special=True).count(token) == 3
    for chosen in range(8):
        plain = [span for at, span in enumerate(spans) if chosen >> at & 1]
        ids = tokenizer.encode(text, allow_special=True, plain_spans=plain)
        assert ids.count(token) == 3 - len(plain)
        assert tokenizer.decode(ids, skip_special=False) == "हि<é>x<é>y<é>"


def as_decoder(tokens: list[dict], **changes: dict) -> dict:
    return {str(t["id"]): {k: v for k, v in t.items() if k != "id"} | changes.get(t["content"], {}) for t in tokens}


@pytest.mark.parametrize("changes", [{"<think>": {"normalized": True}}, {"<think>": {"special": True}}, {}], ids=str)
def test_flags_in_tokenizer_config_go_first(checkpoint: Callable[..., Path], changes: dict) -> None:
    added = json.loads((tiny_path() / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    folder = checkpoint(
        flagged("<tool_call>", "<|im_end|>", normalized=True), lambda c: c.update(added_tokens_decoder=as_decoder(added, **changes))
    )
    assert_same_ids(folder, texts(5, 200))


def test_a_token_that_only_tokenizer_config_has(checkpoint: Callable[..., Path]) -> None:
    added = json.loads((tiny_path() / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    new = {"content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    folder = checkpoint(config=lambda c: c.update(added_tokens_decoder=as_decoder(added) | {"1024": new}))
    assert assert_same_ids(folder, ["a<new>b", "<new>"]).vocab_size == 1025
    folder = checkpoint(config=lambda c: c.update(added_tokens_decoder=as_decoder(added) | {"1030": new}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: added_tokens_decoder gives '<new>' the id 1030"):
        Tokenizer.from_dir(folder)


def test_what_has_no_effect_is_noted(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(config=lambda c: c.update(pad_token="<|PAD|>", split_special_tokens=True, add_prefix_space=True))
    tokenizer = Tokenizer.from_dir(folder)
    assert [note.split(": ")[-1] for note in tokenizer.notes] == [
        "it stays text",
        "split_special_tokens has no effect here",
        "add_prefix_space has no effect here",
    ]
    assert "'<|PAD|>'" in tokenizer.notes[0]
    assert tokenizer.encode("<|PAD|>a", allow_special=True) == Tokenizer.from_dir(tiny_path()).encode("<|PAD|>a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"].update(continuing_subword_prefix="##"), "model.continuing_subword_prefix is '##'"),
        (lambda s: s["model"].update(end_of_word_suffix="</w>"), "model.end_of_word_suffix is '</w>'"),
        (lambda s: s["added_tokens"].clear() or s["model"]["vocab"].pop("!"), "id 0 has no token"),
        (
            lambda s: s["model"]["vocab"].update({"!!": s["model"]["vocab"].pop("!")}),
            "no token for byte 33, so text that has it would be lost",
        ),
        (lambda s: s["added_tokens"][3].update(id=1200), "'<.object_ref_start.>' has id 1200, the tokenizers library gives it 994"),
        (lambda s: s["added_tokens"].reverse(), "'<.audio_pad.>' has id 1023, the tokenizers library gives it 991"),
        (lambda s: s["added_tokens"].append(dict(s["added_tokens"][0])), "added token '<.endoftext.>' is listed twice"),
        (lambda s: s.update(added_tokens={"<x>": 3}), "added_tokens must be a list"),
        (lambda s: s["added_tokens"].append({"id": 1024, "content": "\ud800"}), "U\\+D800"),
        (lambda s: s.update(normalizer={"type": "Lowercase"}) or flagged("<x>", normalized=True)(s), "goes with NFC, not with Low"),
        (flagged("<think>", rstrip=True), "'<think>' has rstrip=true"),
        (flagged("<think>", single_word=True), "'<think>' has single_word=true"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(checkpoint: Callable[..., Path], change: Callable, message: str) -> None:
    folder = checkpoint(change)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_dir(folder)
    assert str(folder / "tokenizer.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_panic_of_the_library_is_a_refusal(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})

    def panics(_: str) -> None:
        raise panic("slice index\nstarts at 2")

    monkeypatch.setattr("tokenizers.Tokenizer.from_str", panics)
    with pytest.raises(ValueError, match=r"tokenizer\.json: slice index starts at 2"):
        Tokenizer.from_dir(checkpoint())


def test_byte_order_marks(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tiny_path() / name).read_bytes())
    marked, plain = Tokenizer.from_dir(tmp_path), Tokenizer.from_dir(tiny_path())
    assert marked.control_tokens == plain.control_tokens and marked.encode("a<think>") == plain.encode("a<think>")
