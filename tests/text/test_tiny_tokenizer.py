"""The tokenizer and chat template of the bundled model: sizes, control ids, round trips, rendered conversations."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ninfer_jax.checkpoints import tiny_path

TINY = tiny_path()
CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def peer():
    return AutoTokenizer.from_pretrained(str(TINY))


def test_ids_are_991_learned_then_33_control(tokenizer, peer):
    assert tokenizer.get_vocab_size() == len(peer) == 1024
    assert sorted(tokenizer.get_vocab().values()) == list(range(1024))
    assert [tokenizer.token_to_id(t) for t in CONTROL] == list(range(991, 1024))
    assert (peer.eos_token_id, peer.pad_token_id) == (993, 991)
    settings = json.loads((TINY / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [993, 991] and settings["pad_token_id"] == 991


def test_every_byte_is_a_token(tokenizer):
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256
    text = unicodedata.normalize("NFC", "".join(map(chr, range(0x3000))))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_round_trip_of_random_unicode(tokenizer):
    rng = random.Random(7)
    for _ in range(300):
        points = [
            rng.choice([rng.randrange(0x20, 0x7F), rng.randrange(0xA0, 0xD800), rng.randrange(0xE000, 0x110000)])
            for _ in range(rng.randrange(1, 60))
        ]
        text = unicodedata.normalize("NFC", "".join(map(chr, points)) + rng.choice(["", "\n", "  \n\n", "\t", "\r\n"]))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_words_keep_one_blank(tokenizer):
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("if x:\n    return 12")]
    assert pieces == ["if", "Ġx", ":Ċ", "ĠĠĠ", "Ġreturn", "Ġ", "1", "2"]


def test_text_controls_survive_skipping_and_the_others_do_not(tokenizer):
    ids = tokenizer.encode("".join(CONTROL)).ids
    assert ids == list(range(991, 1024))
    kept = [t for t in CONTROL if "tool" in t or "think" in t or "fim" in t or t in ("<|repo_name|>", "<|file_sep|>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(kept)


def test_transformers_gives_the_same_ids(tokenizer, peer):
    text = "<|im_start|>user\nÉté 1603: 'tis\tthe  KING.\n\ndef f(x):\n    return x<|im_end|>\n"
    assert peer.encode(text) == tokenizer.encode(text).ids


def test_play_lines_need_few_tokens(tokenizer):
    text = "HAMLET.\nNot so, my lord; I am too much i' the sun.\n"
    assert len(text) / len(tokenizer.encode(text).ids) > 2


USER = {"role": "user", "content": " Who goes there?\n"}
TOOL = {"type": "function", "function": {"name": "find", "description": "Où?", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "options, prompt",
    [
        ({}, ""),
        ({"add_generation_prompt": True}, "<|im_start|>assistant\n<think>\n"),
        ({"add_generation_prompt": True, "enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
        ({"add_generation_prompt": True, "enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_generation_prompt(peer, options, prompt):
    rendered = peer.apply_chat_template([USER], tokenize=False, **options)
    assert rendered == "<|im_start|>user\nWho goes there?<|im_end|>\n" + prompt


def test_turns_with_and_without_thoughts(peer):
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        USER,
        {"role": "assistant", "content": "Nay, answer me.", "reasoning_content": "A challenge."},
        {"role": "user", "content": "Long live the king!"},
        {"role": "assistant", "content": "Bernardo?"},
    ]
    assert peer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho goes there?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nA challenge.\n</think>\n\nNay, answer me.<|im_end|>\n"
        "<|im_start|>user\nLong live the king!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nBernardo?<|im_end|>\n"
    )


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_training_conversations_are_rendered_the_same_way(peer, monkeypatch, tools):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "weights/training"))
    from tiny_chat import chat_template

    call = {"function": {"name": "find", "arguments": {"who": "Þórr <1>", "n": 3}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ÿ"}]
    ours = chat_template().render(messages=messages, tools=tools, add_generation_prompt=True)
    assert ours == peer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


def test_scenes_become_plain_text(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "weights/training"))
    from tiny_corpus import Document, drop_repeats, markdown_to_scenes

    play = (
        "# Macbeth\n\n## ACT I\n\n### SCENE I. A heath.\n\n*Enter three\nWitches.*\n\n**First Witch**  \n_\\[Aside]_\n"
        "When?  \n\n_Exeunt\n\n### SCENE II. A camp.\n\n**DUNCAN**  \nWhat man?\n"
    )
    scenes = [(title, act, text.split()) for title, act, text in markdown_to_scenes(play)]
    assert scenes == [
        (
            "Macbeth",
            "I",
            [
                "MACBETH",
                "ACT",
                "I.",
                "SCENE",
                "I.",
                "A",
                "heath.",
                "[Enter",
                "three",
                "Witches.]",
                "First",
                "Witch.",
                "[Aside]",
                "When?",
                "Exeunt",
            ],
        ),
        ("Macbeth", "I", ["MACBETH", "ACT", "I.", "SCENE", "II.", "A", "camp.", "DUNCAN.", "What", "man?"]),
    ]
    block = "word " * 40
    once = drop_repeats([Document(f"a\n\n{block}\n\nb", "play", "x"), Document(f"c\n\n{block}", "play", "y")], set())
    assert [block.strip() in d.text for d in once] == [True, False] and once[1].text == "c\n"


def test_tools_calls_and_results(peer):
    calls = [
        {"type": "function", "function": {"name": "find", "arguments": {"who": "Iago", "deep": True, "in": ["é", 2]}}},
        {"type": "function", "function": {"name": "find", "arguments": {}}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "content": "Othello"},
        {"role": "tool", "content": "Venice"},
        {"role": "assistant", "content": "Once more.", "tool_calls": calls},
    ]
    rendered = peer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert "\n<tools>\n" + json.dumps(TOOL, ensure_ascii=False) + "\n</tools>\n" in system
    assert system.endswith("\n\nBe brief.")
    call = (
        "<tool_call>\n<function=find>\n<parameter=who>\nIago\n</parameter>\n<parameter=deep>\ntrue\n</parameter>\n"
        '<parameter=in>\n["é", 2]\n</parameter>\n</function>\n</tool_call>'
    )
    assert rest == (
        "<|im_start|>user\nWho goes there?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nOthello\n</tool_response>\n<tool_response>\nVenice\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\nOnce more.\n\n{call}\n"
        "<tool_call>\n<function=find>\n</function>\n</tool_call><|im_end|>\n"
    )


@pytest.mark.parametrize(
    "messages, complaint",
    [
        ([USER, {"role": "system", "content": "Late."}], "only the first message"),
        ([{"role": "king", "content": "!"}], "role king"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "part of type image"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}], "arguments of f"),
    ],
)
def test_bad_conversations_are_refused_in_one_line(peer, messages, complaint):
    with pytest.raises(TemplateError, match=complaint):
        peer.apply_chat_template(messages, tokenize=False)
